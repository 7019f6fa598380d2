"""All shards of a collection seen as one: checked to be of one run, and what each of them still lacks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.collect.identity import ShardIdentity, identity_differences
from nemo_rl.collect.keys import Chunk, KeySpace, RolloutKey
from nemo_rl.collect.lines import read_lines
from nemo_rl.collect.shards import ShardFiles, find_shards
from nemo_rl.errors import ConfigError, DataError

MOST_KEYS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Shard:
    """One seed, or one chunk of it."""

    files: ShardFiles
    seed: int
    keys: KeySpace
    has_begun: bool = True


@dataclass(frozen=True, slots=True)
class Gathering:
    """The shards that make up a collection, those that were not begun included."""

    directory: Path
    shards: tuple[Shard, ...]  # by seed and chunk
    seeds: tuple[int, ...]
    num_tasks: int
    num_repeats: int
    run: Mapping[str, Any]

    @property
    def keys(self) -> KeySpace:
        """Those of one seed over all chunks."""
        return KeySpace(self.num_tasks, self.num_repeats)

    def begun(self, seed: int) -> Sequence[Shard]:
        return [shard for shard in self.shards if shard.seed == seed and shard.has_begun]


@dataclass(frozen=True, slots=True)
class Gap:
    """What a shard lacks."""

    shard: Shard
    num_missing: int
    first: tuple[RolloutKey, ...]  # of the missing
    num_failed: int  # of the missing: tried, and failed each time

    def __str__(self) -> str:
        expected = f"{self.num_missing} of {len(self.shard.keys)} rollouts are missing"
        if not self.shard.has_begun:
            return f"{self.shard.files.name}: was not begun, {expected}"
        failed = f", {self.num_failed} of them failed whenever they were tried" if self.num_failed else ""
        named = ", ".join(f"{key.task_index}/{key.rollout_index}" for key in self.first)
        more = ", ..." if self.num_missing > len(self.first) else ""
        return f"{self.shard.files.name}: {expected}{failed}; task/rollout {named}{more}"


def gather(directory: str | Path, seeds: Iterable[int] | None = None) -> Gathering:
    """The collection in `directory`: of `seeds`, or of those that were begun.

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
        if differences := identity_differences(_of_all(first), _of_all(identity)):
            problem = f"{first_files.name} and {files.name} are of different runs:\n{differences}"
            raise ConfigError("directory", str(directory), problem)
    everyone = tuple(sorted(wanted or {identity.seed for _, identity in found}))
    shards = [shard for seed in everyone for shard in _shards(directory, seed, first.keys, [i for _, i in found])]
    keys = first.keys
    return Gathering(directory, tuple(shards), everyone, keys.num_tasks, keys.num_repeats, first.run)


def gaps(gathering: Gathering) -> Sequence[Gap]:
    """One for each shard that lacks rollouts; in memory one byte a key of one shard."""
    return [gap for shard in gathering.shards if (gap := _gap(shard)) is not None]


def _of_all(identity: ShardIdentity) -> dict[str, Any]:
    """What all shards of a collection have in common."""
    values = identity.as_values()
    return {name: values[name] for name in ("format", "num_tasks", "num_repeats", "run")}


def _shards(directory: Path, seed: int, keys: KeySpace, found: Sequence[ShardIdentity]) -> Sequence[Shard]:
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
            has_begun=index in begun,
        )
        for index in indices
    ]


def _gap(shard: Shard) -> Gap | None:
    is_there, has_failed = bytearray(len(shard.keys)), bytearray(len(shard.keys))
    for path, table in ((shard.files.rollouts, is_there), (shard.files.failures, has_failed)):
        if shard.has_begun and path.exists():
            _mark(path, shard, table)
    num_missing = is_there.count(0)
    if not num_missing:
        return None
    missing = (number for number in range(len(is_there)) if not is_there[number])
    first = tuple(shard.keys.key(number) for number, _ in zip(missing, range(MOST_KEYS_SHOWN), strict=False))
    num_failed = sum(failed and not there for failed, there in zip(has_failed, is_there, strict=True))
    return Gap(shard, num_missing, first, num_failed)


def _mark(path: Path, shard: Shard, table: bytearray) -> None:
    for line in read_lines(path):
        key = RolloutKey(line.task_index, line.rollout_index)
        if line.seed != shard.seed or key not in shard.keys:
            raise DataError(f"{path}: a rollout of another shard, at byte {line.offset}: {line}")
        table[shard.keys.number(key)] = 1
