"""Rows as JSON Lines: read in order, written, or indexed in a large file and read when they are needed."""

import hashlib
import json
import logging
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar

from nemo_rl.errors import DataError, UnusableRowError

logger = logging.getLogger(__name__)

Row: TypeAlias = Mapping[str, Any]
ResultT = TypeVar("ResultT")

DIGEST_BYTES = 8
CHUNK_BYTES = 1 << 20


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's JSON objects in order; blank lines are skipped.

    Raises DataError naming file:line for a line that is no JSON object, and naming the file when it cannot be read.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    location = f"{path}:{number}"
                    yield _parse_object(line, lambda location=location: location)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def to_jsonable(value: Any) -> Any:
    """Return the value itself if JSON can hold it, else a copy with foreign parts as numbers or text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return json.loads(json.dumps(_stringify_keys(value), default=_convert_foreign))
    return value


def convert_rows(rows: Sequence[Row], convert: Callable[[Row], ResultT], source: str) -> list[ResultT]:
    """Return `convert(row)` of each row; raises DataError naming `source` and the row for one that cannot be read."""
    converted = []
    for index, row in enumerate(rows):
        try:
            converted.append(convert(row))
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{source}: row {index}: {describe_row_error(error)}") from error
    return converted


def describe_row_error(error: Exception) -> str:
    """Describe the problem of a row that raised `error`; a KeyError names the field that it lacks."""
    return f"has no field {error}" if isinstance(error, KeyError) else str(error)


class Rows(Protocol):
    """Rows that are read when they are needed: `RowFile`, `TableRows`, `InMemoryRows`, or some of them."""

    digests: "array[int]"

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]: ...

    def location(self, index: int) -> str: ...


@dataclass(frozen=True, slots=True)
class FileState:
    """Size and modification time, which show cheaply that a file may have been written to."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, file: BinaryIO) -> "FileState":
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns)


class RowFile:
    """The JSON objects of a file in order, without blank lines; 20 bytes of memory per row.

    Raises DataError naming file:line for a row that is no JSON object, and naming the file when it cannot be read or is
    no longer the file that was indexed: its size differs, or it was touched and a row that is read has changed.
    """

    def __init__(self, path: Path, *, limit: int | None = None) -> None:
        """Index the file's rows, at most the first `limit`."""
        self.path = path
        self._offsets = array("Q")
        self._lengths = array("I")
        self.digests = array("Q")  # digest of each row's text
        with self._open() as file:
            self._state = FileState.of(file)
            offset = 0
            for line in file:
                if len(self._offsets) == limit:
                    break
                if line.strip():
                    self._offsets.append(offset)
                    self._lengths.append(len(line))
                    self.digests.append(digest_text(line))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> dict[str, Any]:
        with self._open() as file:
            return self._read(file, index)

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows at `indices`, or all rows in order; one is held at a time."""
        with self._open() as file:
            for index in range(len(self)) if indices is None else indices:
                yield self._read(file, index)

    def location(self, index: int) -> str:
        """Return `file:line` of a row, for errors."""
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
        if digest_text(line) != self.digests[index]:
            raise DataError(f"{self.path}: was changed while it is in use: row {index} is not the one that was indexed")
        return _parse_object(line.rstrip(), lambda: self.location(index))  # an error counts columns in this line

    def _check_size(self, file: BinaryIO) -> None:
        state = FileState.of(file)
        if state == self._state:
            return
        if state.size != self._state.size:
            raise DataError(
                f"{self.path}: was changed while it is in use: it has {state.size} bytes and had {self._state.size}"
            )
        logger.info("%s was touched; comparing its rows with the indexed ones as they are read", self.path)
        self._state = state


class InMemoryRows:
    """Rows in memory, with the interface of those of a file."""

    def __init__(self, source: str, rows: Sequence[Row]) -> None:
        """`source` names them in errors."""
        self.digests = array("Q")  # empty: prompts of these rows have ids of their own
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows at `indices`, or all rows in order."""
        return (self.row(index) for index in (range(len(self)) if indices is None else indices))

    def location(self, index: int) -> str:
        return f"{self._source}: row {index}"


class SelectedRows:
    """Some rows of others, with their interface."""

    def __init__(self, rows: Rows, indices: Sequence[int]) -> None:
        self._rows = rows
        self._indices = array("I", indices)
        self.digests = array("Q", (rows.digests[index] for index in indices))

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, index: int) -> dict[str, Any]:
        return self._rows.row(self._indices[index])

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows at `indices`, or all rows in order."""
        chosen = self._indices if indices is None else array("I", (self._indices[index] for index in indices))
        return self._rows.rows(chosen)

    def location(self, index: int) -> str:
        return self._rows.location(self._indices[index])


def _parse_object(line: str | bytes, locate: Callable[[], str]) -> dict[str, Any]:
    """Return the JSON object of a line; `locate` returns its file:line, which is needed for errors alone."""
    try:
        row = json.loads(line if isinstance(line, str) else line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise UnusableRowError(f"{locate()}: no valid JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise UnusableRowError(f"{locate()}: is not UTF-8 text: {error.reason}") from error
    except RecursionError as error:
        raise UnusableRowError(f"{locate()}: JSON that is nested too deeply; allowed: some hundred levels") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise UnusableRowError(f"{locate()}: a number is too long: {error}") from error
    if not isinstance(row, dict):
        raise UnusableRowError(f"{locate()}: a JSON object was expected, not {type(row).__name__}")
    return row


def digest_text(text: bytes) -> int:
    """Return the digest of a row's text without the space around it."""
    return int.from_bytes(hashlib.blake2b(text.strip(), digest_size=DIGEST_BYTES).digest())


def _stringify_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _stringify_keys(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stringify_keys(item) for item in value]
    return value


def _convert_foreign(value: Any) -> Any:
    to_list = getattr(value, "tolist", None)  # numpy's arrays and numbers
    return str(value) if to_list is None else to_list()
