"""Storage of the index: a record of fixed size for each rollout, made of its JSON line; and the files of records."""

import atexit
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, BinaryIO
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

MISSING = -1  # of whole numbers
MAX_NAMES = 65_000  # of a column of names; later ones share the last
OTHER = "(other)"

_NEWLINE = re.compile(b"\n")

RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),  # bytes, the newline included
        ("step", "<i4"),
        ("reward", "<f8"),  # NaN: none
        ("tokens", "<i4"),  # sampled
        ("turns", "<i4"),
        ("task", "<u2"),
        ("stop", "<u2"),
        ("failure", "<u2"),  # 0: none
        ("generation", "<u2"),
        ("group", "<u4"),  # checksums of the ids
        ("prompt", "<u4"),
        ("task_index", "<i4"),
        ("seed", "<i4"),
    ]
)


class _Failure(msgspec.Struct, gc=False, rename={"failure_class": "class"}):
    failure_class: str = "unknown"


_Whole = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]  # as it fits a column
_Small = Annotated[int, msgspec.Meta(ge=0, le=65_535)]


class _Line(msgspec.Struct, gc=False):
    """The fields of a line that are columns; all others are skipped by the parser."""

    step: _Whole = MISSING
    group_id: str = ""
    prompt_id: str = ""
    task_name: str = ""
    generation_index: _Small = 0
    stop_reason: str = ""
    reward: float | None = None
    failure: _Failure | None = None
    num_turns: _Whole = 0
    num_generated_tokens: _Whole = 0
    task_index: _Whole = MISSING
    rollout_index: _Small = 0
    seed: _Whole = MISSING


class Names(dict[str, int]):
    """Names of a column, numbered in the order of their appearance."""

    def __missing__(self, name: str) -> int:
        if len(self) >= MAX_NAMES:
            return self.setdefault(OTHER, MAX_NAMES)
        number = self[name] = len(self)
        return number


class LineEncoder:
    """Makes records of lines; the names of the columns of names, and the number of damaged lines, are its state."""

    def __init__(self) -> None:
        self.num_damaged = 0
        self.names = {name: Names() for name in ("task", "stop", "failure")}
        self.names["failure"][""] = 0
        self._decoder = msgspec.json.Decoder(_Line)

    def name_of(self, column: str, number: int) -> str:
        """Return the name of a number in a column."""
        return next((name for name, each in self.names[column].items() if each == number), OTHER)

    def number_of(self, column: str, name: str) -> int:
        """Return the number of a name in a column; of one that it does not have, a number that no row has."""
        return self.names[column].get(name, MAX_NAMES + 1)

    def encode(self, chunk: memoryview, offset: int) -> npt.NDArray[np.void]:
        """Return the records of complete lines, the first at byte `offset` of the file; damaged ones are skipped."""
        ends = np.array([match.end() for match in _NEWLINE.finditer(chunk)], np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        try:
            lines: list[_Line] = self._decoder.decode_lines(chunk)
        except (msgspec.DecodeError, RecursionError):
            lines = []
        if len(lines) != len(ends):
            parsed = [self._decode_line(bytes(chunk[a:b])) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
            kept = np.array([line is not None for line in parsed], np.bool_)
            lines, starts, ends = [line for line in parsed if line is not None], starts[kept], ends[kept]
        records = np.empty(len(lines), RECORD)
        records["offset"], records["length"] = starts + offset, ends - starts
        self._fill(records, lines)
        return records

    def _fill(self, records: npt.NDArray[np.void], lines: list[_Line]) -> None:
        nan = float("nan")
        columns = {
            "step": [line.step for line in lines],
            "reward": [nan if line.reward is None else line.reward for line in lines],
            "tokens": [line.num_generated_tokens for line in lines],
            "turns": [line.num_turns for line in lines],
            "task": [line.task_name for line in lines],
            "stop": [line.stop_reason for line in lines],
            "failure": ["" if line.failure is None else line.failure.failure_class for line in lines],
            "generation": [line.generation_index or line.rollout_index for line in lines],
            "group": [line.group_id for line in lines],
            "prompt": [line.prompt_id for line in lines],
            "task_index": [line.task_index for line in lines],
            "seed": [line.seed for line in lines],
        }
        for name, values in columns.items():
            numbers = self.names[name].__getitem__ if name in self.names else _CHECKSUMS.get(name)
            if lines and values.count(values[0]) == len(values):  # often: converted once
                records[name] = values[0] if numbers is None else numbers(values[0])
            elif numbers is None:
                records[name] = values
            elif name in self.names:
                records[name] = list(map(numbers, values))
            else:  # neighbours often share their id
                known = {each: numbers(each) for each in dict.fromkeys(values)}
                records[name] = [known[each] for each in values]

    def _decode_line(self, line: bytes) -> _Line | None:
        """Return the columns of one line, also of JSON with NaN; None for a blank or damaged one."""
        if not line.strip():
            return None
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, RecursionError):
            pass
        try:
            values = json.loads(line)
            return msgspec.convert({k: v for k, v in values.items() if k in _Line.__struct_fields__}, _Line)
        except (ValueError, AttributeError, RecursionError, msgspec.ValidationError):
            self.num_damaged += 1
            return None


def checksum(text: object) -> int:
    """Return what the columns of ids hold of an id."""
    return crc32(text.encode(errors="surrogatepass") if isinstance(text, str) else b"")


_CHECKSUMS = {"group": checksum, "prompt": checksum}  # columns of checksums


_numbers = itertools.count()


def cache_directory() -> Path:
    """Return the directory of the cached indexes: that of the user, by the XDG rules."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo-rl" / "viewer"


def index_path(directory: Path, path: Path) -> Path:
    """Return where in a directory the index of a file is kept, but for the suffixes."""
    return directory / hashlib.sha256(str(path.resolve()).encode(errors="replace")).hexdigest()[:32]


def private_index_path(path: Path) -> Path:
    """Return a place for an index that lasts as long as this process. Raises OSError where there is none."""
    return _private_directory() / f"{path.stem}-{next(_numbers)}"


def open_locked(path: Path) -> BinaryIO:
    """Open a file of records that no other process has open. Raises OSError where that is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


@functools.cache
def _private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="nemo-rl-viewer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
