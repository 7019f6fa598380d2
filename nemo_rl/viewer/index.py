"""A byte-offset index over the JSON lines of rollouts: columns to filter by, and rows that are read when shown.

The index is a file of fixed records in the cache directory, mapped into memory, so that memory does not grow with the
number of rollouts and a second start continues where the first one ended. Its checksums tell whether it is intact;
if not, the file is indexed again. The indexed file itself is never written.
The MAX_OPEN most recently used indexes are open; others are opened again when they are read.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from nemo_rl.errors import DataError
from nemo_rl.viewer import index_files
from nemo_rl.viewer.index_records import RECORD, LineEncoder, Names, checksum, parse_object
from nemo_rl.viewer.row_schema import check_row

FORMAT = 4  # version of the cached index
CHUNK_BYTES = 1 << 20
MAX_OPEN = 64  # indexes with open files: two descriptors each
MAX_LINE_BYTES = 256 << 20  # a longer line is not indexed
HEAD_BYTES = 4096  # whose digest tells whether the file is still the one that was indexed
SAVE_PERIOD_ROWS = 100_000

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Query:
    """Filters over the columns, and the order of the result. None and "" accept everything."""

    env: str = ""
    stop: str = ""
    failure: str = ""  # a class, or "any", or "none"
    step: int | None = None
    step_from: int | None = None
    step_to: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    group: str = ""
    prompt: str = ""
    task_index: int | None = None
    text: str = ""
    sort: str = ""  # "", "reward", "-reward", "tokens", "-tokens", "-step"


@dataclass(frozen=True, slots=True)
class TextHits:
    """The rows found, and the row at which to resume if time ran out; None: everything was searched."""

    rows: Rows
    resume_at: int | None


class RolloutIndex:
    """The index of one file. Not for use from several threads at once, and all indexes of a process from the same one.

    Call `advance` until it returns False, and again when the file may have grown. Complete lines alone are indexed; a
    file that has shrunk or was replaced is indexed again, which `notes` tells.
    """

    _opened: ClassVar["OrderedDict[RolloutIndex, None]"] = OrderedDict()  # the one used last at the end

    def __init__(self, path: Path, *, cache: Path | None = None) -> None:
        """`cache`: directory of indexes; None: the user's. A file that does not exist yet has no rollouts."""
        self.path = path
        self.notes: list[str] = []
        self.size = 0  # bytes of the file at the last check
        self.end = 0  # bytes indexed
        self._head = b""
        self._stamp: tuple[int, int, int] | None = None  # state of the file when all of it was indexed
        self._lines = LineEncoder()
        self._num_rows = 0
        self._records_crc = 0
        self._saved_rows = 0
        # path of the index's two files without their suffixes
        self._base = index_files.index_path(cache or index_files.cache_directory(), path)
        self._records: BinaryIO | None = None  # None: closed
        self._columns = np.empty(0, RECORD)
        if path.exists():
            self._open()

    def __len__(self) -> int:
        return self._num_rows

    @property
    def columns(self) -> npt.NDArray[np.void]:
        """Return the records of all rows. The array stays valid, and does not grow."""
        if self._num_rows:
            try:
                self._open()
            except OSError as error:
                raise DataError(f"the index of {self.path} cannot be read: {error.strerror}") from error
        if self._records is not None and len(self._columns) != self._num_rows:
            self._columns = np.memmap(self._records, RECORD, mode="r", shape=(self._num_rows,))
        return self._columns

    def names(self, column: str) -> list[str]:
        """Return the names that a column has: env, stop, failure (without the empty one)."""
        return [name for name in self._lines.names[column] if name]

    def name_of(self, column: str, number: int) -> str:
        return self._lines.name_of(column, number)

    @property
    def num_damaged(self) -> int:
        """Return the number of rows that are no rollout, or too long; those that were indexed count once read."""
        return self._lines.num_damaged

    @property
    def damages(self) -> dict[str, str]:
        """Return why rows are damaged, by file:line."""
        return {f"{self.path.name}:{line}": reason for line, reason in sorted(self._lines.damages.items())}

    @property
    def pending_bytes(self) -> int:
        """Return the bytes that are not indexed: the rest of the file, or an incomplete last line."""
        return max(0, self.size - self.end)

    def advance(self, *, budget_s: float = 0.2) -> bool:
        """Index new lines for about `budget_s`; return whether more can be indexed at once.

        Raises DataError if the file has disappeared or cannot be read.
        """
        until = time.monotonic() + budget_s
        first = self._num_rows
        try:
            stamp = _stamp(self.path)
            if stamp == self._stamp:
                return False
            self._open()
            with self.path.open("rb", buffering=0) as file:
                self._check_identity(file)
                has_more, buffer = True, bytearray(CHUNK_BYTES)
                while has_more and time.monotonic() < until:
                    has_more = self._index_chunk(file, buffer)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read any more: {error.strerror}") from error
        finally:
            if self._num_rows - self._saved_rows >= SAVE_PERIOD_ROWS or first == 0:
                self.save()
        self._stamp = None if has_more else stamp
        return has_more

    def complete(self) -> "RolloutIndex":
        while self.advance(budget_s=5.0):
            pass
        self.save()
        return self

    def read(self, row: int) -> dict[str, Any]:
        """Return the rollout of a row. Raises DataError naming file:line for a damaged one, or one that was changed."""
        columns = self.columns
        if not 0 <= row < len(columns):
            raise DataError(f"{self.path}: there is no rollout {row} (any more)")
        record = columns[row]
        try:
            with self.path.open("rb") as file:
                file.seek(int(record["offset"]))
                line = file.read(int(record["length"]))
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read any more: {error.strerror}") from error
        where = f"{self.path}:{int(record['line'])}"
        if not line.endswith(b"\n"):
            raise DataError(f"{where}: was changed while it was read: rollout {row} is no longer there")
        try:
            values = parse_object(line)
            check_row(values)
        except ValueError as error:
            self._lines.add_damage(int(record["line"]), str(error))
            raise DataError(f"{where}: damaged row: {error}") from error
        if checksum(values.get("group_id", "")) != record["group"]:
            raise DataError(f"{where}: was changed while it was read: rollout {row} is another one now")
        return values

    def select(self, query: Query) -> Rows:  # one branch per filter  # noqa: C901
        """Return the rows that pass all filters but `text`, in the requested order."""
        columns = self.columns
        chosen = np.ones(len(columns), np.bool_)
        for name, wanted in (("env", query.env), ("stop", query.stop)):
            if wanted:
                chosen &= columns[name] == self._lines.number_of(name, wanted)
        if query.failure in ("any", "none"):
            chosen &= (columns["failure"] > 0) == (query.failure == "any")
        elif query.failure:
            chosen &= columns["failure"] == self._lines.number_of("failure", query.failure)
        for name, wanted in (("step", query.step), ("task_index", query.task_index)):
            if wanted is not None:
                chosen &= columns[name] == wanted
        for name, wanted in (("group", query.group), ("prompt", query.prompt)):
            if wanted:
                chosen &= columns[name] == checksum(wanted)
        bounds = (
            ("reward", query.min_reward, query.max_reward),
            ("tokens", query.min_tokens, query.max_tokens),
            ("step", query.step_from, query.step_to),
        )
        for name, low, high in bounds:
            if low is not None:
                chosen &= columns[name] >= low
            if high is not None:
                chosen &= columns[name] <= high
        return self._sort(np.flatnonzero(chosen), query.sort)

    def search(self, rows: Rows, text: str, *, limit: int, budget_s: float = 0.25) -> TextHits:
        """Return the first `limit` of `rows` that say `text`, in exactly this case; search for at most `budget_s`."""
        needle = json.dumps(text, ensure_ascii=False)[1:-1].encode(errors="backslashreplace")
        until = time.monotonic() + budget_s
        hits: list[int] = []
        columns = self.columns
        try:
            with self.path.open("rb") as file:
                for at, row in enumerate(rows.tolist()):
                    if len(hits) >= limit or (at % 64 == 63 and time.monotonic() > until):
                        return TextHits(np.array(hits, np.int64), at)
                    record = columns[row]
                    file.seek(int(record["offset"]))
                    line = file.read(int(record["length"]))
                    if needle in line and _holds_text(line, text):
                        hits.append(row)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read any more: {error.strerror}") from error
        return TextHits(np.array(hits, np.int64), None)

    def save(self) -> None:
        """Store the state, so that a later start continues here."""
        if self._num_rows == self._saved_rows:
            return
        state = {
            "format": FORMAT,
            "path": str(self.path),
            "end": self.end,
            "rows": self._num_rows,
            "head": hashlib.sha256(self._head).hexdigest(),
            "head_bytes": len(self._head),
            "records_crc": self._records_crc,
            "num_lines": self._lines.num_lines,
            "num_damaged": self._lines.num_damaged,
            "damages": list(self._lines.damages.items()),
            "names": {name: list(names) for name, names in self._lines.names.items()},
        }
        unfinished = self._base.with_suffix(f".{os.getpid()}.unfinished")
        with contextlib.suppress(OSError):  # a full disk: the next start indexes again
            text = json.dumps(state)
            unfinished.write_text(f"{crc32(text.encode()):08x}\n{text}")
            unfinished.replace(self._base.with_suffix(".json"))
            self._saved_rows = self._num_rows

    def close(self) -> None:
        """Store the state and release the files; the next use opens them again."""
        self._opened.pop(self, None)
        if self._records is None:
            return
        self.save()
        self._columns = np.empty(0, RECORD)
        fcntl.flock(self._records, fcntl.LOCK_UN)  # arrays that are still in use keep the file open
        self._records.close()
        self._records = None

    def _open(self) -> None:
        """Open the file of records and load its state, unless it is open; close the least recently used index."""
        self._opened[self] = None
        self._opened.move_to_end(self)
        if self._records is not None:
            return
        while len(self._opened) > MAX_OPEN:
            next(iter(self._opened)).close()
        try:
            self._records = index_files.open_locked(self._base.with_suffix(".records"))
        except OSError:  # another viewer writes it, or the directory is read-only
            self._base = index_files.private_index_path(self.path)
            self._records = index_files.open_locked(self._base.with_suffix(".records"))
        num_rows = self._num_rows
        self._reset()
        self._load()
        if self._num_rows < num_rows:
            self._stamp = None  # another viewer replaced the stored index

    def _load(self) -> None:
        """Load a stored index if it is intact and the indexed part of the file is unchanged."""
        assert self._records is not None  # the caller opened it
        try:
            crc, _, text = self._base.with_suffix(".json").read_text().partition("\n")
            state = json.loads(text) if crc == f"{crc32(text.encode()):08x}" else {}
            if state.get("format") != FORMAT:
                return
            size = os.stat(self.path).st_size
            with self.path.open("rb") as file:
                head = file.read(state["head_bytes"])
                file.seek(max(0, state["end"] - 1))
                ends_line = not state["end"] or file.read(1) == b"\n"
            is_same = hashlib.sha256(head).hexdigest() == state["head"] and size >= state["end"] and ends_line
            if not is_same or _read_crc(self._records, state["rows"] * RECORD.itemsize) != state["records_crc"]:
                return
            for name, values in state["names"].items():
                self._lines.names[name] = Names((value, i) for i, value in enumerate(values))
            self._head, self.end, self.size = head, state["end"], size
            self._lines.num_lines, self._lines.num_damaged = state["num_lines"], state["num_damaged"]
            self._lines.damages = dict(state["damages"])
            self._num_rows = self._saved_rows = state["rows"]
            self._records_crc = state["records_crc"]
        except (OSError, ValueError, KeyError, TypeError):
            return  # indexed again

    def _check_identity(self, file: FileIO) -> None:
        self.size = os.fstat(file.fileno()).st_size
        head = file.read(len(self._head)) if self._head else b""
        if self.size < self.end or head != self._head:
            what = "became shorter" if self.size < self.end else "was replaced"
            self.notes = [f"{self.path.name} {what} while it was read; it is indexed from its beginning again"]
            self._reset()
        if len(self._head) < HEAD_BYTES and self.end:
            file.seek(0)
            self._head = file.read(min(HEAD_BYTES, self.end))

    def _reset(self) -> None:
        self.end, self._head, self._saved_rows = 0, b"", 0
        self._lines = LineEncoder()
        self._columns, self._num_rows, self._records_crc = np.empty(0, RECORD), 0, 0

    def _index_chunk(self, file: FileIO, buffer: bytearray) -> bool:
        """Index the complete lines of the next chunk; return whether there was any. `buffer` is overwritten."""
        file.seek(self.end)
        count, cut = 0, 0
        while not cut:
            if count == len(buffer):
                if count >= MAX_LINE_BYTES:
                    return self._skip_long_line(file)
                buffer = buffer + bytes(count)  # doubling: a long line is copied few times
            added = file.readinto(memoryview(buffer)[count:])
            if not added:
                return False  # an incomplete last line
            cut = buffer.rfind(b"\n", count, count + added) + 1
            count += added
        self._append(self._lines.encode(memoryview(buffer)[:cut], self.end))
        self.end += cut
        if len(self._head) < HEAD_BYTES:
            file.seek(0)
            self._head = file.read(min(HEAD_BYTES, self.end))
        return True

    def _skip_long_line(self, file: FileIO) -> bool:
        position = file.tell()
        while block := file.read(CHUNK_BYTES):
            if (at := block.find(b"\n")) >= 0:
                self.end = position + at + 1
                self._lines.num_lines += 1
                self._lines.add_damage(self._lines.num_lines, f"longer than {MAX_LINE_BYTES} bytes")
                return True
            position += len(block)
        return False

    def _append(self, records: npt.NDArray[np.void]) -> None:
        assert self._records is not None  # the caller opened it
        self._records.seek(self._num_rows * RECORD.itemsize)
        view = memoryview(records.tobytes())
        self._records_crc = crc32(view, self._records_crc)
        while view:
            view = view[self._records.write(view) :]
        self._num_rows += len(records)

    def _sort(self, rows: Rows, order: str) -> Rows:
        name = order.lstrip("-")
        if name not in ("reward", "tokens", "step", "turns") or not len(rows):
            return rows
        values = np.asarray(self.columns[name][rows], np.float64)
        values = np.where(
            np.isnan(values), np.inf, -values if order.startswith("-") else values
        )  # rows without a value come last
        return rows[np.argsort(values, kind="stable")]


def _holds_text(line: bytes, text: str) -> bool:
    """Return whether a string of the line that is no key holds `text`."""
    try:
        parts = [json.loads(line)]
    except (ValueError, RecursionError):
        return False
    while parts:
        part = parts.pop()
        if isinstance(part, str) and text in part:
            return True
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return False


def _read_crc(records: BinaryIO, size: int) -> int | None:
    """Return the checksum of the first `size` bytes; None if there are fewer."""
    records.seek(0)
    crc, rest = 0, size
    while rest:
        block = records.read(min(CHUNK_BYTES, rest))
        if not block:
            return None
        crc, rest = crc32(block, crc), rest - len(block)
    return crc


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return values that change with a file's contents: inode, size, time of modification."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
