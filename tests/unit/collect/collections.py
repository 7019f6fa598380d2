"""Collections to test with: what any number of chunks writes is the same, in an order of its own."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.collect.keys import Chunk, KeySpace, RolloutKey
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
