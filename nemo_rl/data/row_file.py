"""A JSON Lines file known by the byte offsets of its rows, so that training on a large one needs little memory.

A row is read when it is asked for, and checked to be the row that was indexed.
"""

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl.errors import DataError

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
