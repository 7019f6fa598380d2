"""Which rollouts a collection is made of: every task of the whole input times its repeats, and the share of a chunk."""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """One rollout of a seed: the row of the whole input, counted before any chunk is cut, and which repeat of it."""

    task_index: int
    rollout_index: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Every `count`-th task from `index` on, with all its repeats.

    Strided: neighbours in a file are alike (one data set behind the other, sorted by difficulty or length), so that
    chunks of neighbours would take unlike times. Repeats stay together, since they share the cache of their prompt.

    Example: chunk 1 of 4 over 10 tasks holds tasks 1, 5, 9.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError("num_chunks", self.count, "must be at least 1")
        if not 0 <= self.index < self.count:
            raise ConfigError(
                "chunk", self.index, f"must be from 0 to {self.count - 1}, the last of {self.count} chunks"
            )


@dataclass(frozen=True, slots=True)
class KeySpace:
    """All keys of one shard, numbered from 0: by task, then by repeat. Takes no memory for them."""

    num_tasks: int  # of the whole input
    num_repeats: int
    chunk: Chunk | None = None  # None: all tasks

    def __post_init__(self) -> None:
        if self.num_repeats < 1:
            raise ConfigError("num_repeats", self.num_repeats, "must be at least 1")

    @property
    def tasks(self) -> range:
        return (
            range(self.num_tasks) if self.chunk is None else range(self.chunk.index, self.num_tasks, self.chunk.count)
        )

    def __len__(self) -> int:
        return len(self.tasks) * self.num_repeats

    def __iter__(self) -> Iterator[RolloutKey]:
        return (RolloutKey(task, repeat) for task in self.tasks for repeat in range(self.num_repeats))

    def __contains__(self, key: RolloutKey) -> bool:
        return key.task_index in self.tasks and 0 <= key.rollout_index < self.num_repeats

    def number(self, key: RolloutKey) -> int:
        """The key's place; ValueError for a key that is not of this shard."""
        if key not in self:
            raise ValueError(f"{key} is not one of the {len(self)} keys of {self}")
        return self.tasks.index(key.task_index) * self.num_repeats + key.rollout_index

    def key(self, number: int) -> RolloutKey:
        index, repeat = divmod(number, self.num_repeats)
        return RolloutKey(self.tasks[index], repeat)
