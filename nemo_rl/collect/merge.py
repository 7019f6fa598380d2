"""The shards of a collection joined in one file, in an order that no chunk or kill changes."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_rl.collect.rollout_files import atomic_write, read_lines
from nemo_rl.collect.shard_set import Gap, Shard, ShardSet, find_gaps, load_shard_set
from nemo_rl.collect.shards import FORMAT
from nemo_rl.distributed.machine import raise_file_limit
from nemo_rl.errors import DataError, NemoRLError

MERGED = "rollouts"  # name of the merged files without their endings
BLOCK_LINES = 1 << 16


@dataclass(frozen=True, slots=True)
class MergeResult:
    """Files and counts of a merge."""

    rollouts: Path
    num_rollouts: int
    num_failures: int  # attempts, also of rollouts that ended well
    gaps: tuple[Gap, ...]  # empty: complete

    @property
    def done(self) -> Path:
        return self.rollouts.with_name(f"{self.rollouts.name}.done")


class IncompleteCollection(NemoRLError):
    """A collection lacks rollouts; the text lists them."""


def merge(directory: str | Path, *, seeds: Iterable[int] | None = None, allow_partial: bool = False) -> MergeResult:
    """Write rollouts.jsonl, rollouts_failures.jsonl and rollouts_identity.json from the shards in `directory`.

    Rows are ordered by seed, task and rollout, attempts of one rollout by time; every line is its shard's, byte by
    byte. Each file appears whole or not at all; `rollouts.jsonl.done` is written last, and only if nothing is
    missing. Shards are kept. A second merge writes the same.

    `seeds`: those that must be present; None: those that were begun. Raises ConfigError for shards of different runs,
    IncompleteCollection for missing rollouts unless `allow_partial`. Holds some 50 bytes per rollout of one seed.
    """
    gathering = load_shard_set(directory, seeds)
    missing = tuple(find_gaps(gathering))
    if missing and not allow_partial:
        listed = "\n".join(f"  {gap}" for gap in missing)
        raise IncompleteCollection(f"{gathering.directory}: the collection is incomplete:\n{listed}")
    raise_file_limit()  # a seed's shards are open at once
    paths = {part: gathering.directory / f"{MERGED}{part}" for part in (".jsonl", "_failures.jsonl", "_identity.json")}
    done = gathering.directory / f"{MERGED}.jsonl.done"
    done.unlink(missing_ok=True)
    num_rollouts = _write(paths[".jsonl"], gathering, lambda shard: shard.files.rollouts, is_unique=True)
    num_failures = _write(paths["_failures.jsonl"], gathering, lambda shard: shard.files.failures, is_unique=False)
    _write_identity(paths["_identity.json"], gathering)
    merged = MergeResult(paths[".jsonl"], num_rollouts, num_failures, missing)
    if not missing:
        with atomic_write(merged.done) as file:
            file.write((json.dumps({"finished": num_rollouts}) + "\n").encode())
    return merged


def _write(path: Path, gathering: ShardSet, part: Callable[[Shard], Path], *, is_unique: bool) -> int:
    count = 0
    with atomic_write(path) as file:
        for seed in gathering.seeds:
            paths = [part(shard) for shard in gathering.begun(seed)]
            for line in _iter_ordered_lines(
                [path for path in paths if path.exists()], gathering.num_repeats, is_unique
            ):
                file.write(line)
                count += 1
    return count


def _iter_ordered_lines(paths: Sequence[Path], num_repeats: int, is_unique: bool) -> Iterator[bytes]:
    """Yield the lines of all files by task and rollout; those of one rollout keep their order."""
    numbers, offsets, file_indices = array("q"), array("q"), array("I")
    for file_index, path in enumerate(paths):
        for line in read_lines(path):
            numbers.append(line.task_index * num_repeats + line.rollout_index)
            offsets.append(line.offset)
            file_indices.append(file_index)
    keys = np.frombuffer(numbers, np.int64) if numbers else np.empty(0, np.int64)
    order = np.argsort(keys, kind="stable")
    if is_unique and (twice := np.flatnonzero(np.diff(keys[order]) == 0)).size:
        task, rollout = divmod(int(keys[order[twice[0]]]), num_repeats)
        raise DataError(f"{paths[file_indices[int(order[twice[0]])]]}: rollout {rollout} of task {task} is there twice")
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]
        for start in range(0, len(order), BLOCK_LINES):
            for index in order[start : start + BLOCK_LINES].tolist():
                file = files[file_indices[index]]
                file.seek(offsets[index])
                yield file.readline()


def _write_identity(path: Path, gathering: ShardSet) -> None:
    values = {
        "format": FORMAT,
        "seeds": gathering.seeds,
        "num_tasks": gathering.num_tasks,
        "num_repeats": gathering.num_repeats,
        "run": gathering.run,
    }
    with atomic_write(path) as file:
        file.write((json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode())
