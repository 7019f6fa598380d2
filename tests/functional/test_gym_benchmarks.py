"""AIME24 and LiveCodeBench by NeMo Gym in miniature: four seeds, killed and resumed, and the table counted again.

Gym's own files are named as its documentation does, and its own processes verify the answers. The model says one of
four texts, so the recount knows from a rollout's text alone what it is worth.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import yaml

from tests.contracts.openai_server import SERVED_NAME, openai_server
from tests.contracts.real_gym import VERSIONS, gym_environment, stack_processes
from tests.functional.cli import environment
from tests.support.answering_model import save_answering_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # each starts a stack and an engine twice

NUM_TASKS, NUM_REPEATS, SEEDS = 6, 2, (0, 1, 2, 3)
MAX_LENGTH = 512
DEADLINE_S = 1500  # of one collection, with the start of its stack on a busy machine
VOTES = len(SEEDS) * NUM_REPEATS
MODEL_SERVER = "responses_api_models/vllm_model/configs/vllm_model.yaml"
MATH = {
    "resources_servers": {
        "math_with_judge": {
            "judge_model_server": {"name": "policy_model"},
            "library_verifier_timeout_seconds": 300,  # of a busy machine
        }
    }
}
CODE = {"resources_servers": {"code_gen": {"unit_test_timeout_secs": 300}}}


def solve(answer: int) -> str:
    """An answer to both benchmarks."""
    return f"It is \\boxed{{{answer}}}.\n```python\nprint({answer})\n```"


ANSWERS = {solve(15): 0.4, solve(7): 0.3, solve(204): 0.2, "I do not know.": 0.1}
EXPECTED = (15, 204, 15, 7, 999, 15)  # of each task


def math_row(expected: int) -> dict[str, Any]:
    return {"question": "?", "expected_answer": str(expected)}


def code_row(expected: int) -> dict[str, Any]:
    return {"verifier_metadata": {"unit_tests": {"inputs": [""], "outputs": [f"{expected}\n"]}}}


BENCHMARKS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "aime24": ("resources_servers/math_with_judge/configs/dapo17k.yaml", "math_with_judge", MATH, math_row),
    "livecodebench": ("resources_servers/code_gen/configs/code_gen.yaml", "code_gen", CODE, code_row),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_answering_model(directory, ANSWERS, max_length=MAX_LENGTH)
    return directory


@pytest.fixture(params=["self-hosted", "pre-hosted"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The section `server`: an engine that the collection starts, or one that runs already."""
    if request.param == "self-hosted":
        yield {}
        return
    options = {
        "--served-model-name": SERVED_NAME,
        "--max-model-len": MAX_LENGTH,
        "--logprobs-mode": "processed_logprobs",
    }
    with openai_server(model, tmp_path / "server.log", options) as url:
        yield {"address": url, "api": "completions"}


def write_recipe(directory: Path, benchmark: str, model: Path, server: dict[str, Any], version: str) -> Path:
    """Write the rows and the recipe of a collection into `directory`; return the recipe's path."""
    config_path, resources, settings, row = BENCHMARKS[benchmark]
    rows = []
    for index, expected in enumerate(EXPECTED):
        asked = {"input": [{"role": "user", "content": f"Task {index}: what is it?"}]}
        rows.append({"responses_create_params": asked, **row(expected)})
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    recipe = {
        "collect": {"output_dir": str(directory / "out"), "num_repeats": NUM_REPEATS, "concurrency": 4}
        | {"seeds": f"{SEEDS[0]}..{SEEDS[-1]}"},
        "policy": {"model_name": str(model), "precision": "float32", "max_total_sequence_length": MAX_LENGTH}
        | {"generation": {"max_new_tokens": 8, "temperature": 1.0}},
        "server": server,
        "data": {
            "input": {"dataset_name": "nemo_gym", "data_path": str(data), "name": benchmark}
            | {"agent_name": f"{resources}_simple_agent"}
        },
        "env": {
            "nemo_gym": {
                "version": version,
                "config_paths": [MODEL_SERVER, config_path],
                "overrides": {resources: settings},
            }
        },
        "gateway": {"tool_parser": None},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def start(recipe: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "nemo_rl", "collect", "--config", str(recipe), "logger.progress=false"]
    return subprocess.Popen(
        command,
        cwd=recipe.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def num_stored(output: Path, seed: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (output / f"rollouts-rs{seed}.jsonl").read_bytes().count(b"\n")
    return 0


def kill_midway(process: "subprocess.Popen[str]", output: Path) -> None:
    """Kill a collection in its second seed, with what it started."""
    ends_at = time.monotonic() + DEADLINE_S
    while num_stored(output, SEEDS[1]) < 3:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    while stack_processes(output / "nemo_gym" / "nemo_gym" / "env.yaml"):
        assert time.monotonic() < ends_at
        time.sleep(0.1)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_benchmark_that_was_killed_ends_with_the_table_of_its_rollouts(
    benchmark: str, server: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    version = VERSIONS[0] if server else VERSIONS[1]
    gym_environment(version)
    recipe, output = write_recipe(tmp_path, benchmark, model, server, version), tmp_path / "out"
    kill_midway(start(recipe), output)
    stored = [(output / f"rollouts-rs{seed}.jsonl").read_bytes() for seed in SEEDS[:2]]

    resumed = start(recipe)
    said, _ = resumed.communicate(timeout=DEADLINE_S)
    assert resumed.returncode == 0, said[-4000:]
    for seed, before in zip(SEEDS, stored, strict=False):
        whole = before[: before.rfind(b"\n") + 1]
        assert (output / f"rollouts-rs{seed}.jsonl").read_bytes().startswith(whole)
    assert all((output / f"rollouts-rs{seed}_failures.jsonl").read_bytes() == b"" for seed in SEEDS)

    run_nemo_rl("merge", output)
    rows = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    keys = [(row["seed"], row["task_index"], row["rollout_index"]) for row in rows]
    assert keys == [(seed, task, n) for seed in SEEDS for task in range(NUM_TASKS) for n in range(NUM_REPEATS)]
    texts = [row["messages"][-1]["content"] for row in rows]
    assert set(texts) <= ANSWERS.keys()
    worth = [float(text == solve(EXPECTED[row["task_index"]])) for text, row in zip(texts, rows, strict=True)]
    assert [row["reward"] for row in rows] == worth
    assert 0 < mean(worth) < 1

    said_by_task: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for row, text, reward in zip(rows, texts, worth, strict=True):
        said_by_task[row["task_index"]].append((text, reward))
    table = run_nemo_rl("profile", output)
    (summary,) = json.loads((output / "profile.json").read_text())["datasets"]
    assert summary["num_tasks"] == NUM_TASKS
    for name, values in recount([*said_by_task.values()]).items():
        score = summary["scores"][name]
        error = stdev(values) / NUM_TASKS**0.5
        assert (score["mean"], score["standard_error"]) == (pytest.approx(mean(values)), pytest.approx(error))
        assert f"{mean(values):.4f} ± {error:.4f}" in next(line for line in table.splitlines() if f" {name} " in line)


def recount(tasks: list[list[tuple[str, float]]]) -> dict[str, list[float]]:
    """Return each score of each task, over all subsets of its rollouts (text, reward)."""
    scores = {"reward": [mean(reward for _, reward in task) for task in tasks]}
    scores[f"pass@1[avg-of-{VOTES}]"] = scores["reward"]
    for k in (2, 4, 8):
        subsets = [[*combinations(task, k)] for task in tasks]
        scores[f"pass@{k}"] = [mean(max(reward for _, reward in each) for each in every) for every in subsets]
        scores[f"majority@{k}"] = [mean(vote(each) for each in every) for every in subsets]
    return scores


def vote(rollouts: tuple[tuple[str, float], ...]) -> float:
    """Return the mean reward of the answers that most give; who does not know has no vote."""
    votes = Counter((text, reward) for text, reward in rollouts if "boxed" in text)
    if not votes:
        return 0.0
    return mean(reward for (_, reward), count in votes.items() if count == max(votes.values()))


def run_nemo_rl(verb: str, output: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "nemo_rl", verb, str(output)],
        env={**environment(), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
