"""Collections to test with: what any number of chunks writes is the same, in an order of its own."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.collect.shards import Chunk, KeySpace, RolloutKey, Task, write_tasks
from nemo_rl.collect.store import RolloutStore
from nemo_rl.types import Failure, FailureClass

IDENTITY = {"data": "d", "config": {"temperature": 1.0}, "model": "m"}


def row_of(seed: int, key: RolloutKey) -> dict[str, Any]:
    return {"reward": (seed + key.task_index * key.rollout_index) % 3 / 2, "messages": [{"content": f"{seed} {key}"}]}


def collect(
    directory: Path,
    *,
    seed: int = 0,
    num_tasks: int = 10,
    num_repeats: int = 3,
    chunk: Chunk | None = None,
    rows: Callable[[int, RolloutKey], Mapping[str, Any]] = row_of,
    left_out: frozenset[RolloutKey] = frozenset(),
    fails: frozenset[RolloutKey] = frozenset(),
    identity: Mapping[str, Any] = IDENTITY,
) -> RolloutStore:
    """Write one shard in an order drawn anew for each; the store is closed."""
    keys = KeySpace(num_tasks, num_repeats, chunk)
    with RolloutStore.open(directory, seed=seed, keys=keys, identity=identity, max_attempts=2) as store:
        order = list(store.missing())
        random.Random(f"{directory} {seed} {chunk}").shuffle(order)
        for key in order:
            for attempt in range(2 if key in fails else (key.task_index % 4 == 0)):
                store.append_failure(key, Failure(FailureClass.INFRA, f"attempt {attempt}"))
            if key not in left_out | fails:
                store.append(key, rows(seed, key))
        if not store.num_missing:
            store.finish()
    return store


def rollout(reward: float, tokens: int, answer: str | None, *, dataset: str = "words") -> dict[str, Any]:
    """A row with what profiles count, and messages that they must not read."""
    return {
        "dataset": dataset,
        "stop_reason": "done",
        "reward": reward,
        "answer": answer,
        "num_generated_tokens": tokens,
        "messages": [{"role": "assistant", "content": '", "messages": ', "reward": 100}],
    }


# Of three tasks, by (seed, task, rollout); what is not here is missing, the third task whole.
WORKED = {
    (0, 0, 0): rollout(1.0, 10, "a"),
    (0, 0, 1): rollout(0.0, 20, "b"),
    (1, 0, 0): rollout(1.0, 30, "a"),
    (1, 0, 1): rollout(1.0, 60, "a"),
    (0, 1, 0): rollout(0.5, 5, "c"),
    (1, 1, 0): rollout(0.0, 5, "d"),
    (1, 1, 1): rollout(0.0, 7, None),
}
WORKED_TASKS = tuple(Task(f"p{i}", "words", "spell", {"question": f"q{i}"}) for i in range(3))


def collect_worked(directory: Path, *, change: float = 0.0, identity: Mapping[str, Any] = IDENTITY) -> None:
    """Seeds 0 and 1, two rollouts of each of three tasks; `change` is added to every reward."""
    write_tasks(directory, WORKED_TASKS)
    for seed in (0, 1):
        with RolloutStore.open(directory, seed=seed, keys=KeySpace(3, 2), identity=identity) as store:
            for (of_seed, task, repeat), row in WORKED.items():
                if of_seed == seed:
                    store.append(RolloutKey(task, repeat), {**row, "reward": row["reward"] + change})
            store.append_failure(RolloutKey(2, 0), Failure(FailureClass.ENVIRONMENT, "ValueError: no"))
