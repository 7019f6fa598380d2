"""The shards of a collection joined in one file, in an order that no chunk or kill changes."""

import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl.collect.files import atomic_write, read_lines
from nemo_rl.collect.shards import (
    FORMAT,
    Chunk,
    KeySpace,
    RolloutKey,
    ShardFiles,
    ShardIdentity,
    describe_identity_differences,
    find_shards,
)
from nemo_rl.distributed.machine import raise_file_limit
from nemo_rl.errors import ConfigError, DataError, NemoRLError

logger = logging.getLogger(__name__)

MAX_KEYS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Shard:
    """One seed, or one chunk of it."""

    files: ShardFiles
    seed: int
    keys: KeySpace
    has_started: bool = True


@dataclass(frozen=True, slots=True)
class ShardSet:
    """The shards that make up a collection, including those that were not begun."""

    directory: Path
    shards: tuple[Shard, ...]  # by seed and chunk
    seeds: tuple[int, ...]
    num_tasks: int
    num_repeats: int
    run: Mapping[str, Any]

    @property
    def keys(self) -> KeySpace:
        """Return the keys of one seed over all chunks."""
        return KeySpace(self.num_tasks, self.num_repeats)

    def begun(self, seed: int) -> Sequence[Shard]:
        return [shard for shard in self.shards if shard.seed == seed and shard.has_started]


@dataclass(frozen=True, slots=True)
class Gap:
    """Rollouts that a shard lacks."""

    shard: Shard
    num_missing: int
    first: tuple[RolloutKey, ...]  # of the missing
    num_failed: int  # of the missing: tried, and failed each time

    def __str__(self) -> str:
        expected = f"{self.num_missing} of {len(self.shard.keys)} rollouts are missing"
        if not self.shard.has_started:
            return f"{self.shard.files.name}: was not begun, {expected}"
        failed = f", {self.num_failed} of them failed whenever they were tried" if self.num_failed else ""
        named = ", ".join(f"{key.task_index}/{key.rollout_index}" for key in self.first)
        more = ", ..." if self.num_missing > len(self.first) else ""
        return f"{self.shard.files.name}: {expected}{failed}; task/rollout {named}{more}"


def load_shard_set(directory: str | Path, seeds: Iterable[int] | None = None) -> ShardSet:
    """Load the shards in `directory`: of `seeds`, or of those that were begun.

    Raises ConfigError where there is none, and where shards are of different runs, with each difference.
    """
    directory = Path(directory)
    found = [(files, ShardIdentity.read(files.identity)) for files in find_shards(directory)]
    wanted = None if seeds is None else set(seeds)
    found = [(files, identity) for files, identity in found if wanted is None or identity.seed in wanted]
    if not found:
        raise ConfigError(
            "directory", str(directory), "holds no rollouts" + ("" if wanted is None else " of these seeds")
        )
    first_files, first = found[0]
    for files, identity in found[1:]:
        if differences := describe_identity_differences(_shared_identity(first), _shared_identity(identity)):
            problem = f"{first_files.name} and {files.name} are of different runs:\n{differences}"
            raise ConfigError("directory", str(directory), problem)
    all_seeds = tuple(sorted(wanted or {identity.seed for _, identity in found}))
    shards = [shard for seed in all_seeds for shard in _seed_shards(directory, seed, first.keys, [i for _, i in found])]
    keys = first.keys
    return ShardSet(directory, tuple(shards), all_seeds, keys.num_tasks, keys.num_repeats, first.run)


def find_gaps(shard_set: ShardSet) -> Sequence[Gap]:
    """Return a gap for each shard that lacks rollouts. Holds one byte for each key of one shard."""
    return [gap for shard in shard_set.shards if (gap := _find_gap(shard)) is not None]


def _shared_identity(identity: ShardIdentity) -> dict[str, Any]:
    """Return the values that all shards of a collection share."""
    values = identity.to_dict()
    return {name: values[name] for name in ("format", "num_tasks", "num_repeats", "run")}


def _seed_shards(directory: Path, seed: int, keys: KeySpace, found: Sequence[ShardIdentity]) -> Sequence[Shard]:
    chunks = [identity.keys.chunk for identity in found if identity.seed == seed]
    counts = {None if chunk is None else chunk.count for chunk in chunks}
    if len(counts) > 1:
        ways = " and ".join(sorted("whole" if count is None else f"in {count} chunks" for count in counts))
        raise ConfigError("directory", str(directory), f"seed {seed} was collected {ways}")
    count = counts.pop() if counts else None
    begun = {None if chunk is None else chunk.index for chunk in chunks}
    indices: Sequence[int | None] = [None] if count is None else range(count)
    return [
        Shard(
            ShardFiles.of(directory, seed, index),
            seed,
            KeySpace(keys.num_tasks, keys.num_repeats, None if count is None or index is None else Chunk(index, count)),
            has_started=index in begun,
        )
        for index in indices
    ]


def _find_gap(shard: Shard) -> Gap | None:
    is_present, has_failed = bytearray(len(shard.keys)), bytearray(len(shard.keys))
    for path, table in ((shard.files.rollouts, is_present), (shard.files.failures, has_failed)):
        if shard.has_started and path.exists():
            _mark_present(path, shard, table)
    num_missing = is_present.count(0)
    if not num_missing:
        return None
    missing = (number for number in range(len(is_present)) if not is_present[number])
    first = tuple(shard.keys.key(number) for number, _ in zip(missing, range(MAX_KEYS_SHOWN), strict=False))
    num_failed = sum(failed and not there for failed, there in zip(has_failed, is_present, strict=True))
    return Gap(shard, num_missing, first, num_failed)


def _mark_present(path: Path, shard: Shard, table: bytearray) -> None:
    for line in read_lines(path):
        key = RolloutKey(line.task_index, line.rollout_index)
        if line.seed != shard.seed or key not in shard.keys:
            raise DataError(f"{path}: a rollout of another shard, at byte {line.offset}: {line}")
        table[shard.keys.number(key)] = 1


MERGED = "rollouts"
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
    byte. Each file appears whole or not at all; `rollouts.jsonl.done` is written last, and only where nothing is
    missing. Shards stay. A second merge writes the same.

    `seeds`: those that must be there; None: those that were begun. Raises ConfigError for shards of different runs,
    IncompleteCollection for missing rollouts unless `allow_partial`. Holds some 50 bytes a rollout of one seed.
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
