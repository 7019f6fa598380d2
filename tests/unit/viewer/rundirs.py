"""Run directories and collections from plain values, as a run and `nemo-rl collect` write them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.collect.shards import KeySpace, RolloutKey
from nemo_rl.collect.store import RolloutStore
from tests.unit.collect.collections import IDENTITY


def rollout(step: int = 1, *, group: str = "g", index: int = 0, reward: float | None = 1.0, **values: Any) -> dict:
    """Return a line of train.jsonl; the answer is the text `answer <step>.<index>`."""
    answer = values.pop("text", f"answer {step}.{index}")
    return {
        "step": step,
        "group_id": f"{step}:{group}",
        "prompt_id": group,
        "dataset": "",
        "task_name": "math",
        "generation_index": index,
        "stop_reason": "done",
        "reward": reward,
        "rewards": {} if reward is None else {"math": reward},
        "answer": None,
        "failure": None,
        "num_turns": 1,
        "num_tokens": 16,
        "num_generated_tokens": len(answer.split()),
        "weight_versions": [step - 1, step - 1],
        "timings": {"generation_s": 0.1, "environment_s": 0.01, "total_s": 0.12},
        "messages": [{"role": "user", "content": f"question {group}"}, {"role": "assistant", "content": answer}],
        **values,
    }


def failed(step: int = 1, *, kind: str = "environment", cause: str = "ValueError: bad move", **values: Any) -> dict:
    """Return the line of a failed rollout."""
    failure = {"class": kind, "cause": cause, "traceback": f"Traceback (most recent call last):\n{cause}"}
    return rollout(step, reward=None, stop_reason="failed", failure=failure, **values)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Append rows to a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def write_run(
    directory: Path,
    *,
    metrics: Iterable[Mapping[str, Any]] = (),
    train: Iterable[Mapping[str, Any]] = (),
    validation: Iterable[Mapping[str, Any]] = (),
    config: str = "grpo:\n  max_num_steps: 10\n",
) -> Path:
    """Write a run directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(config)
    write_lines(directory / "metrics.jsonl", metrics)
    write_lines(directory / "rollouts" / "train.jsonl", train)
    write_lines(directory / "rollouts" / "validation.jsonl", validation)
    return directory


def write_record(
    run: Path, *starts: Mapping[str, Any], name: str | None = None, tags: Sequence[str] = (), notes: str = ""
) -> None:
    """Write run.json with these starts; of each what differs from one that failed after an hour."""
    usual = {"started_at": 1_800_000_000.0, "host": "node1", "pid": 7, "cause": "", "ended_at": 1_800_003_600.0}
    usual["state"] = "failed"
    record = {"name": name or run.name, "tags": list(tags), "notes": notes, "starts": [usual | dict(s) for s in starts]}
    (run / "run.json").write_text(json.dumps(record))


def write_collection(directory: Path, rewards: Sequence[Sequence[float]]) -> Path:
    """Write a finished collection of `rewards[task][rollout]` and return its directory."""
    keys = KeySpace(len(rewards), len(rewards[0]))
    with RolloutStore.open(directory, seed=0, keys=keys, identity=IDENTITY) as store:
        for task, given in enumerate(rewards):
            for index, reward in enumerate(given):
                store.append(RolloutKey(task, index), rollout(reward=reward, num_generated_tokens=10))
        store.finish()
    return directory
