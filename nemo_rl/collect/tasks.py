"""The whole input of a collection, a line for each task, stored with its shards for profiles and curricula."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nemo_rl.collect.files import atomic_write
from nemo_rl.data.rows import encode_json_line, read_jsonl
from nemo_rl.errors import ConfigError, DataError

TASKS_FILE = "tasks.jsonl"


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the input; its index in the input is its task_index."""

    prompt_id: str
    dataset: str
    task_name: str  # the environment that scores it
    row: Mapping[str, Any]  # as the dataset has it, so that a curriculum of such rows can be trained on


@dataclass(frozen=True, slots=True)
class TasksSummary:
    """Size and digest of the input."""

    num_tasks: int
    digest: str  # of all tasks in order; for the identity of the shards


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
    """Yield all tasks in order; none where the directory has no such file."""
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
        yield encode_json_line({"task_index": index, **origin, "row": task.row})


def _check_unchanged(path: Path, lines: Iterator[bytes], digest: "hashlib._Hash") -> int:
    count = 0
    with path.open("rb") as file:
        for before, now in zip_longest(file, lines):
            if before != now:
                difference = (
                    f"task {count} differs\n  was {_truncate_for_display(before)}\n  is  {_truncate_for_display(now)}"
                )
                raise ConfigError("output_dir", str(path.parent), f"holds a collection of other data: {difference}")
            digest.update(now)
            count += 1
    return count


def _truncate_for_display(line: bytes | None) -> str:
    if line is None:
        return "not there"
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= 300 else f"{text[:300]}..."
