"""The shards that make up a collection, and the rollouts that they lack."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.collect.rollout_files import read_lines
from nemo_rl.collect.shards import (
    Chunk,
    KeySpace,
    RolloutKey,
    ShardFiles,
    ShardIdentity,
    describe_identity_differences,
    find_shards,
)
from nemo_rl.errors import ConfigError, DataError

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
    first: tuple[RolloutKey, ...]  # the first missing rollouts
    num_failed: int  # missing rollouts that were tried and failed each time

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

    Raises ConfigError if there are none, and lists the differences of shards of different runs.
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
