"""Prompts that are not held in memory: those of a large file, and blends of them with others, as sequences.

A prompt of a file is made from its row whenever it is asked for. What is needed of all prompts at once (ids, agents,
environments) is known without reading rows again.
"""

import hashlib
import json
import logging
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, BinaryIO, Protocol, overload

import numpy as np

from nemo_rl.errors import DataError
from nemo_rl.types import Prompt

logger = logging.getLogger(__name__)

DIGEST_BYTES = 8
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells cheaply that a file may have been written to."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, file: BinaryIO) -> "FileState":
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)


class RowFile:
    """The JSON objects of a file in order, without those of blank lines; 20 bytes of memory a row.

    Raises DataError naming file:line for a row that is no JSON object, naming the file when it cannot be read, and when
    it is no longer the file that was indexed: its size differs, or it was touched and a row asked for is another.
    """

    def __init__(self, path: Path, *, limit: int | None = None) -> None:
        """Index the file's rows, the first `limit` at most."""
        self.path = path
        self._offsets = array("Q")
        self._lengths = array("I")
        self.digests = array("Q")  # of each row's text
        with self._open() as file:
            self._state = FileState.of(file)
            offset = 0
            for line in file:
                if len(self._offsets) == limit:
                    break
                if line.strip():
                    self._offsets.append(offset)
                    self._lengths.append(len(line))
                    self.digests.append(_digest(line))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> dict[str, Any]:
        with self._open() as file:
            return self._read(file, index)

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        """All rows in order, or those asked for; one is held at a time."""
        with self._open() as file:
            for index in range(len(self)) if indices is None else indices:
                yield self._read(file, index)

    def location(self, index: int) -> str:
        """`file:line` of a row, for errors."""
        number, remaining = 1, self._offsets[index]
        with self._open() as file:
            while remaining > 0:
                chunk = file.read(min(remaining, CHUNK_BYTES))
                number += chunk.count(b"\n")
                remaining -= len(chunk) or remaining
        return f"{self.path}:{number}"

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _read(self, file: BinaryIO, index: int) -> dict[str, Any]:
        self._check_size(file)
        file.seek(self._offsets[index])
        line = file.read(self._lengths[index])
        if _digest(line) != self.digests[index]:
            raise DataError(f"{self.path}: was changed while it is in use: row {index} is not the one that was indexed")
        try:
            row = json.loads(line.rstrip())  # an error counts columns in this line
        except json.JSONDecodeError as error:
            raise DataError(f"{self.location(index)}: no valid JSON: {error.msg} at column {error.colno}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{self.location(index)}: is not UTF-8 text: {error.reason}") from error
        if not isinstance(row, dict):
            raise DataError(f"{self.location(index)}: a JSON object was expected, not {type(row).__name__}")
        return row

    def _check_size(self, file: BinaryIO) -> None:
        state = FileState.of(file)
        if state == self._state:
            return
        if state.size != self._state.size:
            raise DataError(
                f"{self.path}: was changed while it is in use: it has {state.size} bytes and had {self._state.size}"
            )
        logger.info("%s was touched; its rows are compared with those indexed as they are read", self.path)
        self._state = state


def _digest(line: bytes) -> int:
    """Of the row's text, whatever ends its line."""
    return int.from_bytes(hashlib.blake2b(line.strip(), digest_size=DIGEST_BYTES).digest())


class InMemoryRows:
    """Rows in memory, asked for as those of a file."""

    def __init__(self, source: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """`source` names them in errors."""
        self.digests = array("Q")  # of none: prompts of these rows have ids of their own
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        return (self.row(index) for index in (range(len(self)) if indices is None else indices))

    def location(self, index: int) -> str:
        return f"{self._source}: row {index}"


class Rows(Protocol):
    """Rows that are read as they are asked for: `RowFile`, or `InMemoryRows`."""

    digests: "array[int]"

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]: ...

    def location(self, index: int) -> str: ...


class FilePrompts:
    """One prompt a row of a file, without their ids.

    Every row is read once, so that one that cannot be used is found at the start: DataError names file:line.
    """

    def __init__(
        self,
        file: Rows,
        make_prompt: Callable[[dict[str, Any]], Prompt],
        *,
        digest: Callable[[Prompt], int] | None = None,
    ) -> None:
        """`digest` is what a prompt's id is made of; None: the text of its row."""
        self.digests = file.digests if digest is None else array("Q")
        self._file = file
        self._make_prompt = make_prompt
        tasks, agents = set(), set()
        for index, row in enumerate(file.rows()):
            prompt = self._build_prompt(index, row)
            tasks.add(prompt.task_name)
            agents.add(prompt.agent_name)
            if digest is not None:
                self.digests.append(digest(prompt))
        self.task_names = frozenset(tasks)
        self.agent_names = frozenset(agents - {""})

    def __len__(self) -> int:
        return len(self._file)

    def at(self, index: int) -> Prompt:
        return self._build_prompt(index, self._file.row(index))

    def read(self, indices: Sequence[int]) -> Iterator[Prompt]:
        """Those prompts, with the file opened once."""
        return (prompt for prompt, _ in self.read_rows(indices))

    def read_rows(self, indices: Sequence[int]) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """Those prompts, each with its row."""
        for index, row in zip(indices, self._file.rows(indices), strict=True):
            yield self._build_prompt(index, row), row

    def _build_prompt(self, index: int, row: dict[str, Any]) -> Prompt:
        try:
            return self._make_prompt(row)
        except (DataError, KeyError, TypeError, ValueError) as error:
            problem = f"has no field {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{self._file.location(index)}: {problem}") from error


class InMemoryPrompts:
    """Prompts in memory, as a part of a blend."""

    def __init__(self, prompts: Sequence[Prompt], digests: Sequence[int]) -> None:
        self.digests = array("Q", digests)
        self.task_names = frozenset(prompt.task_name for prompt in prompts)
        self.agent_names = frozenset(prompt.agent_name for prompt in prompts if prompt.agent_name)
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, index: int) -> Prompt:
        return self.prompts[index]

    def read(self, indices: Sequence[int]) -> Iterator[Prompt]:
        return (self.prompts[index] for index in indices)


@dataclass(frozen=True, slots=True)
class Blend(Sequence[Prompt]):
    """Prompts of several parts one after another, with ids: a digest of what they are made of, numbered where it
    repeats. A prompt keeps its id when others are added, removed or moved. A slice is a blend too."""

    parts: tuple[FilePrompts | InMemoryPrompts, ...]
    positions: "array[int]"  # of its prompts, counted over all parts
    repeats: "array[int]"  # of each: how many prompts before it are made of the same

    @classmethod
    def of(cls, parts: Sequence[FilePrompts | InMemoryPrompts], *, without: Container[int] = ()) -> "Blend":
        """All prompts of the parts but those at the places `without`."""
        positions = array(
            "I", (position for position in range(sum(len(part) for part in parts)) if position not in without)
        )
        digests = np.concatenate([np.asarray(part.digests, dtype=np.uint64) for part in parts])
        return cls(tuple(parts), positions, _count_earlier_duplicates(digests[np.asarray(positions)]))

    @property
    def task_names(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.task_names for part in self.parts))

    @property
    def agent_names(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.agent_names for part in self.parts))

    def prompt_ids(self) -> Iterator[str]:
        """Of all prompts in order; no row is read."""
        starts = self._part_offsets()
        for position, repeat in zip(self.positions, self.repeats, strict=True):
            number = bisect_right(starts, position) - 1
            yield _prompt_id(self.parts[number].digests[position - starts[number]], repeat)

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "Blend": ...
    def __getitem__(self, index: int | slice) -> "Prompt | Blend":
        if isinstance(index, slice):
            return Blend(self.parts, self.positions[index], self.repeats[index])
        position, starts = self.positions[index], self._part_offsets()
        number = bisect_right(starts, position) - 1
        part, row = self.parts[number], position - starts[number]
        return replace(part.at(row), prompt_id=_prompt_id(part.digests[row], self.repeats[index]))

    def __iter__(self) -> Iterator[Prompt]:
        """One prompt is held at a time; a file is opened once for a stretch of its rows."""
        starts, index = self._part_offsets(), 0
        for number, stretch in groupby(self.positions, key=lambda position: bisect_right(starts, position) - 1):
            part, rows = self.parts[number], array("I", (position - starts[number] for position in stretch))
            for row, prompt in zip(rows, part.read(rows), strict=True):
                yield replace(prompt, prompt_id=_prompt_id(part.digests[row], self.repeats[index]))
                index += 1

    def _part_offsets(self) -> list[int]:
        """The place at which each part begins."""
        return list(accumulate((len(part) for part in self.parts[:-1]), initial=0))


def _prompt_id(digest: int, repeat: int) -> str:
    return f"{digest:016x}-{repeat}" if repeat else f"{digest:016x}"


def _count_earlier_duplicates(digests: np.ndarray) -> "array[int]":
    """How many equal numbers stand before each: [7, 5, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    ranks = np.arange(len(ordered), dtype=np.uint32)
    repeats = np.empty(len(ordered), dtype=np.uint32)
    repeats[order] = ranks - np.maximum.accumulate(np.where(is_first, ranks, 0))
    return array("I", repeats.tobytes())
