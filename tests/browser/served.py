"""A directory of runs with all that the pages show, and the viewer over it as a process of its own."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.unit.viewer.hostile import TEXTS
from tests.unit.viewer.rundirs import failed, rollout, write_lines, write_record, write_run
from tests.unit.viewer.traced import write_trace

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
NUM_STEPS = 12
LONG = " and then the next step of the calculation" * 20  # longer than what is unfolded by itself
TOOL_CALL = {"id": "call_1", "name": "calculator", "arguments": {"expression": "17 * 3"}}


def write_runs(directory: Path) -> Path:
    """Write two runs, a run of an agent, one of hostile texts, and a collection."""
    for name, gain in (("exp_001", 0.0), ("exp_002", 0.2)):
        metrics = [_metrics(step, gain) for step in range(1, NUM_STEPS + 1)]
        train = [
            rollout(s, group=g, index=i, reward=float(i % 2), text=f"<think>let me add</think>The sum at {s} is {i}.")
            for s in range(1, NUM_STEPS + 1)
            for g in "abc"
            for i in range(4)
        ]
        train += [failed(5, group="f", cause="ToolError: the calculator is out of order"), failed(6, group="f")]
        train += [
            rollout(7, group="t", index=i, stop_reason="truncated", num_generated_tokens=900 + i, text="words " * 900)
            for i in range(3)
        ]
        validation = [
            rollout(s, group=f"v{p}", reward=float(s > 0 or p == 0), text=f"validation answer {p} at {s}")
            for s in (0, 12)
            for p in range(4)
        ]
        config = f"grpo:\n  max_num_steps: 12\npolicy:\n  lr: {0.001 + gain}\n"
        run = write_run(directory / name, metrics=metrics, train=train, validation=validation, config=config)
        write_lines(run / "rollouts" / "details.jsonl", [_details(1, "1:a", i) for i in range(4)])
    _write_sums(directory / "exp_003")
    lost = write_run(directory / "exp_004", metrics=[_metrics(1, 0.0), _metrics(2, 0.0)])
    write_record(lost, {"cause": "OutOfMemoryError: CUDA out of memory"}, name="long answers", tags=["ablation"])
    write_run(directory / "agent", metrics=[{"step": 1, "train/reward": 1.0}], train=[_tool_rollout()])
    hostile = [rollout(1, group=f"h{i}", text=text, task_name=text[:300]) for i, text in enumerate(TEXTS)]
    write_run(directory / "hostile", metrics=[{"step": 1, "train/reward": 1.0}], train=hostile, config=TEXTS[0])
    rows = [rollout(task_index=t, rollout_index=i, seed=0, reward=float(i < t)) for t in range(4) for i in range(4)]
    write_lines(directory / "words" / "rollouts-rs0.jsonl", rows)
    return directory


def _write_sums(directory: Path) -> None:
    """Write a run whose rows know what was expected: groups that are all wrong, mixed, and all right."""
    rewards = {"hard": (0.0, 0.0), "fair": (0.0, 1.0), "easy": (1.0, 1.0)}
    train = [
        rollout(
            step,
            group=group,
            index=index,
            reward=reward,
            text=f"**{group}**: the sum is \\boxed{{{40 + int(2 * reward)}}}",
            answer=str(40 + int(2 * reward)),
            env_state={"answer": "42"},
        )
        for step in range(1, 4)
        for group, given in rewards.items()
        for index, reward in enumerate(given)
    ]
    write_trace(write_run(directory, metrics=[_metrics(step, 0.4) for step in range(1, 4)], train=train))


def _metrics(step: int, gain: float) -> dict[str, Any]:
    return {
        "step": step,
        "train/reward": step / 20 + gain,
        "train/mean_gen_tokens_per_sample": 20.0 + step,
        "train/truncation_rate": 0.1,
        "train/token_mult_prob_error": 1.01,
        "train/loss": 0.1,
        "timing/train/total_step_time": 2.0,
        "timing/train/generation": 1.2,
        "timing/train/policy_training": 0.8,
        **({f"validation/{name}": 0.25 + step / 20 for name in ("reward", "accuracy")} if step % 6 == 0 else {}),
    }


def _details(step: int, group: str, index: int) -> dict[str, Any]:
    return {
        "step": step,
        "group_id": group,
        "generation_index": index,
        "chain": 0,
        "num_tokens": 5,
        "num_omitted": 0,
        "text": ["question", " a", "The", " sum", "."],
        "mask": "00111",
        "policy_logprobs": [-0.1, -2.5, -0.01],
        "engine_logprobs": [-0.1, -2.4, -0.01],
        "advantage": 0.7,
    }


def _tool_rollout() -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Use the calculator."}]
    for turn in range(5):
        messages += [
            {"role": "user", "content": f"question of turn {turn}"},
            {"role": "assistant", "content": f"<think>thought {turn}</think>I calculate.", "tool_calls": [TOOL_CALL]},
            {"role": "tool", "content": f"result {turn}: 51" + turn * LONG, "tool_call_id": "call_1"},
        ]
    messages.append({"role": "assistant", "content": "The answer is 51."})
    return rollout(1, group="tools", num_turns=5, messages=messages, other_chains=[messages[:4], messages[:2]])


@contextlib.contextmanager
def served(directory: Path, cache: Path) -> Iterator[str]:
    """Run `nemo-rl view` over a directory and yield the address that it prints."""
    command = [sys.executable, "-m", "nemo_rl", "view", str(directory)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+", process.stdout.readline())
            assert match is not None
            yield match[0]
        finally:
            process.kill()
