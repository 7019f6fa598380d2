import json
import math
import random
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.viewer.check import check
from nemo_rl.viewer.viewer_sources import ViewerSource
from tests.unit.viewer.rundirs import failed, rollout, write_run

NUM_STEPS = 40
PROMPTS = 4
GROUP = 4

Metrics = dict[str, Any]
Change = Callable[[int, random.Random, Metrics], None]
Speak = Callable[[int, random.Random], dict[str, Any]]


def healthy_metrics(step: int, rng: random.Random) -> Metrics:
    """Return the metrics of a run that learns: reward from 0.2 to 0.7, entropy falling by half."""
    done = step / NUM_STEPS
    return {
        "step": step,
        "train/reward": 0.2 + 0.5 * done + rng.gauss(0, 0.02),
        "train/loss": rng.gauss(0, 0.01),
        "train/grad_norm": 1 + rng.random(),
        "train/lr": 1e-4,
        "train/approx_entropy": 0.8 - 0.4 * done,
        "train/token_mult_prob_error": 1.002,
        "train/truncation_rate": 0.02,
        "train/max_turns_reached_rate": 0.0,
        "train/mean_gen_tokens_per_sample": 60 + 10 * done,
        "train/avg_trajectory_age": 0.5,
        "train/kl_penalty": 0.01 * done,
        "train/is_oob_ratio": 0.01,
        "train/num_optimizer_steps": 1,
        "train/num_skipped_steps": 0,
        "train/num_valid_samples": 16,
        "train/num_masked_seqs_by_logprob_error": 0,
        "timing/train/total_step_time": 2 + rng.random(),
        **({"validation/reward": 0.2 + 0.5 * done} if step % 10 == 0 else {}),
    }


def healthy_answer(step: int, rng: random.Random) -> dict[str, Any]:
    words = [
        rng.choice(["the", "sum", "of", "both", "is", "then", "so", "we", "get"]) + str(rng.randrange(99))
        for _ in range(40)
    ]
    return {"text": " ".join(words), "reward": float(rng.random() < 0.2 + 0.5 * step / NUM_STEPS)}


def make_run(directory: Path, change: Change, speak: Speak, extra: Iterable[dict[str, Any]]) -> ViewerSource:
    rng = random.Random(7)
    metrics, rows = [], []
    for step in range(1, NUM_STEPS + 1):
        line = healthy_metrics(step, rng)
        change(step, rng, line)
        metrics.append(line)
        for prompt in range(PROMPTS):
            question = f"Add the numbers {step * 7 + prompt} and {step * 11} and explain each of your steps in full."
            for index in range(GROUP):
                row = rollout(step, group=f"{step}.{prompt}", index=index, **speak(step, rng))
                row["messages"][0]["content"] = question
                rows.append(row)
    validation = [rollout(s, group=str(p)) for s in (10, 20, 30, 40) for p in range(200)]
    write_run(directory, metrics=metrics, train=[*rows, *extra], validation=validation)
    return ViewerSource("run", directory, "run", directory.parent / "cache").complete()


def put(**changes: Callable[[float], Any]) -> Change:
    """Replace metrics by a function of the share of the run that is done; `__` in a name stands for `/`."""

    def change(step: int, rng: random.Random, metrics: Metrics) -> None:
        for name, value in changes.items():
            name = name.replace("__", "/")
            if not name.startswith("validation") or name in metrics:
                metrics[name] = value(step / NUM_STEPS)

    return change


def say(make: Callable[[int, random.Random], str]) -> Speak:
    return lambda step, rng: {**healthy_answer(step, rng), "text": make(step, rng)}


def nothing(step: int, rng: random.Random, metrics: Metrics) -> None:
    pass


def noisy(level: float) -> Change:
    def change(step: int, rng: random.Random, metrics: Metrics) -> None:
        metrics["train/reward"] = level + rng.gauss(0, 0.02)
        if step % 10 == 0:
            metrics["validation/reward"] = level

    return change


def all_equal(step: int, rng: random.Random) -> dict[str, Any]:
    return {**healthy_answer(step, rng), "reward": 0.0 if step > 1 else 1.0}


PLANTED: dict[str, tuple[str, Change, Speak, list[dict[str, Any]]]] = {
    "reward is zero": (
        "reward_zero",
        put(train__reward=lambda d: 0.0),
        lambda s, r: {**healthy_answer(s, r), "reward": 0.0},
        [],
    ),
    "reward does not move": ("reward_flat", noisy(0.3), healthy_answer, []),
    "reward collapses": (
        "reward_collapse",
        put(train__reward=lambda d: 0.2 + d if d < 0.7 else 0.05),
        healthy_answer,
        [],
    ),
    "groups agree": ("groups_without_signal", nothing, all_equal, []),
    "engine disagrees": (
        "logprob_error",
        put(train__token_mult_prob_error=lambda d: 1.0 + 0.2 * d),
        healthy_answer,
        [],
    ),
    "rollouts grow stale": (
        "staleness_growing",
        put(train__avg_trajectory_age=lambda d: 0.5 + 6 * d),
        healthy_answer,
        [],
    ),
    "engine fails": ("failures_infra", nothing, healthy_answer, [failed(40, kind="infra", index=i) for i in range(60)]),
    "environment fails": ("failures_environment", nothing, healthy_answer, [failed(40, index=i) for i in range(60)]),
    "agent fails": ("failures_agent", nothing, healthy_answer, [failed(40, kind="agent", index=i) for i in range(60)]),
    "reward fails": (
        "failures_reward",
        nothing,
        healthy_answer,
        [failed(40, kind="reward", index=i) for i in range(60)],
    ),
    "answers are cut": ("truncation", put(train__truncation_rate=lambda d: 0.6 * d), healthy_answer, []),
    "turns run out": ("turn_limit", put(train__max_turns_reached_rate=lambda d: 0.9), healthy_answer, []),
    "answers repeat": ("repetition", nothing, say(lambda s, r: f"I think {r.random()} so. " * 60), []),
    "length is hacked": (
        "length_hacking",
        put(train__mean_gen_tokens_per_sample=lambda d: 60 + 400 * d, validation__reward=lambda d: 0.3),
        healthy_answer,
        [],
    ),
    "entropy collapses": (
        "entropy_collapse",
        put(train__approx_entropy=lambda d: 0.8 * math.exp(-9 * d)),
        healthy_answer,
        [],
    ),
    "validation falls": ("validation_apart", put(validation__reward=lambda d: 0.6 - 0.4 * d), healthy_answer, []),
    "loss is NaN": ("nonfinite", put(train__loss=lambda d: "NaN" if d > 0.9 else 0.0), healthy_answer, []),
    "gradient explodes": (
        "gradient_explosion",
        put(train__grad_norm=lambda d: 1.0 if d < 0.8 else 500.0),
        healthy_answer,
        [],
    ),
    "KL blows up": ("kl_blowup", put(train__kl_penalty=lambda d: 0.01 if d < 0.8 else 30.0), healthy_answer, []),
    "nothing is learnt": ("no_updates", put(train__lr=lambda d: 0.0), healthy_answer, []),
    "weights are clamped": ("off_policy", put(train__is_oob_ratio=lambda d: 0.6), healthy_answer, []),
    "sequences are masked": (
        "masked_sequences",
        put(train__num_masked_seqs_by_logprob_error=lambda d: 8),
        healthy_answer,
        [],
    ),
    "answers are empty": ("empty_answers", nothing, say(lambda s, r: " "), []),
    "answers are garbled": (
        "garbled_answers",
        nothing,
        say(lambda s, r: "".join(r.choice("\ufffd\x01ab") for _ in range(80))),
        [],
    ),
    "prompt is copied": ("prompt_copied", nothing, lambda s, r: {**healthy_answer(s, r), "text": ""}, []),
    "answers are identical": ("identical_answers", nothing, say(lambda s, r: "The answer is 42."), []),
}


@pytest.mark.parametrize(
    ("state", "cause", "finding"),
    [
        ("ended", "", None),
        ("interrupted", "", None),
        ("failed", "RolloutError: 32 of 32 rollouts failed", "run_failed"),
        ("running", "", "run_died"),  # and no process holds the directory
    ],
)
def test_run_that_ended_by_an_error_is_an_alarm_with_its_cause(
    state: str, cause: str, finding: str | None, tmp_path: Path
) -> None:
    source = make_run(tmp_path / "run", nothing, healthy_answer, [])
    host = socket.gethostname()
    start = {"started_at": 1.0, "host": host, "pid": 41, "state": state, "cause": cause, "ended_at": 2.0}
    record = {"name": "run", "tags": [], "notes": "", "starts": [start]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    found = check(source)
    assert [each.name for each in found] == ([finding] if finding else [])
    assert all(each.severity == "alarm" and f"after step {NUM_STEPS}" in each.evidence for each in found)
    assert all(cause in each.evidence and (cause or f"process 41 on {host}") in each.evidence for each in found)


def test_healthy_run_has_no_finding(tmp_path: Path) -> None:
    assert check(make_run(tmp_path / "run", nothing, healthy_answer, [])) == []


@pytest.mark.parametrize("name", PLANTED)
def test_planted_pathology_is_named_and_nothing_else(tmp_path: Path, name: str) -> None:
    expected, change, speak, extra = PLANTED[name]
    if name == "prompt is copied":
        source = make_run(tmp_path / "run", change, healthy_answer, extra)
        copy_prompts(tmp_path / "run")
        source = ViewerSource("run", tmp_path / "run", "run", tmp_path / "cache").complete()
    else:
        source = make_run(tmp_path / "run", change, speak, extra)
    alarms = {finding.name for finding in check(source) if finding.severity == "alarm"}
    allowed = {"reward is zero": {"groups_without_signal"}, "answers are identical": set()}.get(name, set())
    assert expected in alarms
    assert alarms - allowed == {expected}


def copy_prompts(run: Path) -> None:
    path = run / "rollouts" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["messages"][1]["content"] = f"You said: {row['messages'][0]['content']} {row['messages'][1]['content']}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_few_failures_are_a_warning_with_cause_and_link(tmp_path: Path) -> None:
    (finding,) = check(make_run(tmp_path / "run", nothing, healthy_answer, [failed(40, kind="infra", cause="Boom: 1")]))
    assert (finding.name, finding.severity) == ("failures_infra", "warning")
    assert "1 of 641 rollouts failed; the first: Boom: 1" in finding.evidence
    assert finding.links == (
        ("all of them", "/s/run/rollouts/train?failure=infra"),
        ("rollout 0.640", "/s/run/rollout/train/0.640"),
    )


def test_solved_task_is_no_collapse(tmp_path: Path) -> None:
    def solved(step: int, rng: random.Random, metrics: Metrics) -> None:
        metrics |= {"train/reward": min(1.0, 0.3 + 2 * step / NUM_STEPS), "train/approx_entropy": 0.8 * math.exp(-step)}

    answers = say(lambda s, r: "42")
    speak: Speak = lambda s, r: {**answers(s, r), "reward": 1.0}  # noqa: E731
    assert check(make_run(tmp_path / "run", solved, speak, [])) == []


def test_solved_task_without_gradient_is_no_missing_update(tmp_path: Path) -> None:
    change = put(train__reward=lambda d: 1.0, train__grad_norm=lambda d: 0.0, train__approx_entropy=lambda d: 0.1)
    run = make_run(tmp_path / "run", change, lambda step, rng: {**healthy_answer(step, rng), "reward": 1.0}, [])
    assert check(run) == []


def test_empty_run_has_no_finding(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert check(ViewerSource("run", tmp_path / "run", "run", tmp_path / "cache").complete()) == []
