"""Shards of a collection: their rollouts, the identity of their run, their files, and the whole input beside them."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nemo_rl.collect.rollout_files import atomic_write
from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.experience.rollout_rows import encode_json_line

FORMAT = 1  # version of identity files
TASKS_FILE = "tasks.jsonl"
MAX_DIFFERENCES_SHOWN = 20
_NAME = re.compile(r"rollouts-rs(\d+)(?:-chunk(\d+))?")


class OtherCollectionError(ConfigError):
    """The directory was begun with another configuration, input or number of chunks."""


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """One rollout of a seed: the row of the whole input, counted before any chunk is cut, and which repeat of it."""

    task_index: int
    rollout_index: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Every `count`-th task from `index` on, with all its repeats.

    Strided, because neighbours in a file are alike (datasets are concatenated, rows sorted by difficulty or length) and
    chunks of neighbours would take unequal times. Repeats stay together to share the prefix cache of their prompt.

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
    """All keys of one shard, numbered from 0: by task, then by repeat. Holds none of them in memory."""

    num_tasks: int  # tasks of the whole input
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
        """Return the number of a key; raises ValueError for a key of another shard."""
        if key not in self:
            raise ValueError(f"{key} is not one of the {len(self)} keys of {self}")
        return self.tasks.index(key.task_index) * self.num_repeats + key.rollout_index

    def key(self, number: int) -> RolloutKey:
        index, repeat = divmod(number, self.num_repeats)
        return RolloutKey(self.tasks[index], repeat)


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Seed and keys of a shard, and the identity of its run."""

    seed: int
    keys: KeySpace
    run: Mapping[str, Any]  # data, config, model: plain nested values, the same for all shards of a collection

    def to_dict(self) -> dict[str, Any]:
        """Return the identity as JSON reads it back."""
        chunk = self.keys.chunk
        values = {
            "format": FORMAT,
            "seed": self.seed,
            "chunk": None if chunk is None else chunk.index,
            "num_chunks": 1 if chunk is None else chunk.count,
            "num_tasks": self.keys.num_tasks,
            "num_repeats": self.keys.num_repeats,
            "run": self.run,
        }
        return json.loads(json.dumps(values, allow_nan=False))

    def write(self, path: Path) -> None:
        with atomic_write(path) as file:
            file.write((json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> "ShardIdentity":
        """Read an identity; raises DataError for a file that holds none."""
        try:
            values = json.loads(path.read_bytes())
            chunk = None if values["chunk"] is None else Chunk(values["chunk"], values["num_chunks"])
            keys = KeySpace(values["num_tasks"], values["num_repeats"], chunk)
            return cls(values["seed"], keys, values["run"])
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise DataError(f"{path}: is not the identity of a shard: {error}") from error

    def check(self, path: Path) -> None:
        """Raise ConfigError unless the identity at `path` is this one, with every difference."""
        if differences := describe_identity_differences(ShardIdentity.read(path).to_dict(), self.to_dict()):
            raise OtherCollectionError(
                "output_dir",
                str(path.parent),
                f"holds rollouts of another run; choose another directory:\n{differences}",
            )


def describe_identity_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe each nested key whose values differ on a line; empty when none does.

    Example: "  run.config.temperature: was 1.0, is 0.7"
    """
    old, new = dict(_leaves(before)), dict(_leaves(now))
    keys = [key for key in {**old, **new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    lines = [
        f"  {key}: was {old.get(key, _ABSENT)!r}, is {new.get(key, _ABSENT)!r}" for key in keys[:MAX_DIFFERENCES_SHOWN]
    ]
    if len(keys) > MAX_DIFFERENCES_SHOWN:
        lines.append(f"  and {len(keys) - MAX_DIFFERENCES_SHOWN} more")
    return "\n".join(lines)


class _Absent:
    def __repr__(self) -> str:
        return "not set"


_ABSENT = _Absent()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True, slots=True)
class OverlongInput:
    """Prompts of the input that are too long to be sampled from; part of the identity of a run that has any."""

    treatment: str  # `data.overlong`: mask or drop
    max_tokens: int  # limit for a prompt
    num_prompts: Mapping[str, int]  # by dataset

    @classmethod
    def of_run(cls, run: Mapping[str, Any]) -> "OverlongInput | None":
        """Return those of a run's identity; None without any."""
        data = run.get("data")
        values = data.get("overlong") if isinstance(data, Mapping) else None
        return None if values is None else cls(**values)

    def describe(self) -> str:
        """Describe what became of them.

        Example: "3 prompts of more than 512 tokens (data.max_input_seq_length) count as wrong (data.overlong: mask)".
        """
        count = sum(self.num_prompts.values())
        fate = "are left out of all scores" if self.treatment == "drop" else "count as wrong"
        which = f"{count} prompts of more than {self.max_tokens} tokens (data.max_input_seq_length)"
        return f"{which} {fate} (data.overlong: {self.treatment})"


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of a shard, whose names have a common prefix."""

    directory: Path
    name: str  # without suffix: "rollouts-rs0-chunk3"

    @classmethod
    def of(cls, directory: str | Path, seed: int, chunk_index: int | None = None) -> "ShardFiles":
        chunk = "" if chunk_index is None else f"-chunk{chunk_index}"
        return cls(Path(directory), f"rollouts-rs{seed}{chunk}")

    @property
    def seed(self) -> int:
        match = _NAME.fullmatch(self.name)
        assert match is not None
        return int(match[1])

    @property
    def rollouts(self) -> Path:
        return self.directory / f"{self.name}.jsonl"

    @property
    def failures(self) -> Path:
        return self.directory / f"{self.name}_failures.jsonl"

    @property
    def identity(self) -> Path:
        return self.directory / f"{self.name}_identity.json"

    @property
    def done(self) -> Path:
        return self.directory / f"{self.name}.jsonl.done"


def find_shards(directory: str | Path) -> Sequence[ShardFiles]:
    """Find every shard that was begun in `directory`, sorted by seed and chunk."""
    found = {path.name.removesuffix("_identity.json") for path in Path(directory).glob("rollouts-rs*_identity.json")}
    named = [(match, name) for name in found if (match := _NAME.fullmatch(name))]
    named.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)))
    return [ShardFiles(Path(directory), name) for _, name in named]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the input; its index in the input is its task_index."""

    prompt_id: str
    dataset: str
    task_name: str  # the environment that scores it
    row: Mapping[str, Any]  # as the dataset has it, so that a curriculum of such rows can be trained on
    env: str = ""  # the environment in records: NeMo Gym's agent; empty: task_name


@dataclass(frozen=True, slots=True)
class TasksSummary:
    """Size and digest of the input."""

    num_tasks: int
    digest: str  # digest of all tasks in order; part of the identity of the shards


def write_tasks(directory: str | Path, tasks: Iterable[Task]) -> TasksSummary:
    """Write all tasks to `tasks.jsonl`, or check that they are those that are there. Holds one task at a time.

    Every shard's job calls it before its store is opened, with the whole input. Raises ConfigError naming the first
    task that differs.
    """
    path = Path(directory) / TASKS_FILE
    digest = hashlib.sha256()
    if path.exists():
        return TasksSummary(_check_unchanged(path, _encode_lines(tasks), digest), digest.hexdigest())
    count = 0
    with atomic_write(path) as file:
        for line in _encode_lines(tasks):
            file.write(line)
            digest.update(line)
            count += 1
    return TasksSummary(count, digest.hexdigest())


def read_tasks(directory: str | Path) -> Iterator[Task]:
    """Yield all tasks in order; none if the directory has no such file."""
    path = Path(directory) / TASKS_FILE
    if not path.exists():
        return
    for number, row in enumerate(read_jsonl(path)):
        try:
            index = row.pop("task_index")
            task = Task(**row)
        except (KeyError, TypeError) as error:
            raise DataError(f"{path}:{number + 1}: is no task: {error}") from error
        if index != number:
            raise DataError(f"{path}:{number + 1}: task {index}, where {number} was expected")
        yield task


def _encode_lines(tasks: Iterable[Task]) -> Iterator[bytes]:
    for index, task in enumerate(tasks):
        origin = {"prompt_id": task.prompt_id, "dataset": task.dataset, "task_name": task.task_name}
        agent = {"env": task.env} if task.env else {}
        yield encode_json_line({"task_index": index, **origin, **agent, "row": task.row})


def _check_unchanged(path: Path, lines: Iterator[bytes], digest: "hashlib._Hash") -> int:
    count = 0
    with path.open("rb") as file:
        for before, now in zip_longest(file, lines):
            if before != now:
                difference = (
                    f"task {count} differs\n  was {_truncate_for_display(before)}\n  is  {_truncate_for_display(now)}"
                )
                raise OtherCollectionError(
                    "output_dir",
                    str(path.parent),
                    f"holds a collection of other data; choose another directory: {difference}",
                )
            digest.update(now)
            count += 1
    return count


def _truncate_for_display(line: bytes | None) -> str:
    if line is None:
        return "not there"
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= 300 else f"{text[:300]}..."
