"""Records of the index: one of fixed size per rollout, made from its JSON line."""

import json
import re
from typing import Annotated, Any
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

MISSING = -1  # value of an absent integer
MAX_NAMES = 65_000  # names per column; later ones share the last number
OTHER = "(other)"
MAX_DAMAGES = 1000  # damaged rows of a file that are kept by line; more are counted
ID_COLUMNS = ("group", "prompt")  # columns of checksums

_NEWLINE = re.compile(b"\n")

RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),  # bytes, the newline included
        ("step", "<i4"),
        ("reward", "<f8"),  # NaN if missing
        ("tokens", "<i4"),  # sampled
        ("turns", "<i4"),
        ("env", "<u2"),
        ("stop", "<u2"),
        ("failure", "<u2"),  # 0 if it did not fail
        ("generation", "<u2"),
        ("group", "<u4"),  # checksums of the ids
        ("prompt", "<u4"),
        ("task_index", "<i4"),
        ("seed", "<i4"),
        ("line", "<u4"),  # number of the line in its file, from 1
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
    env: str = ""  # absent from older files, whose environment is task_name
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
    """Encodes lines as records; its state is the number of lines, the damaged ones, and the names of the columns."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_damaged = 0
        self.damages: dict[int, str] = {}  # why a row is damaged, by line; at most MAX_DAMAGES
        self.names = {name: Names() for name in ("env", "stop", "failure")}
        self.names["failure"][""] = 0
        self._decoder = msgspec.json.Decoder(_Line)

    def name_of(self, column: str, number: int) -> str:
        return next((name for name, each in self.names[column].items() if each == number), OTHER)

    def number_of(self, column: str, name: str) -> int:
        """Return the number of a name in a column; of one that it does not have, a number that no row has."""
        return self.names[column].get(name, MAX_NAMES + 1)

    def add_damage(self, line: int, reason: str) -> None:
        """Count a damaged row, once."""
        if line not in self.damages:
            self.num_damaged += 1
            if len(self.damages) < MAX_DAMAGES:
                self.damages[line] = reason

    def encode(self, chunk: memoryview, offset: int) -> npt.NDArray[np.void]:
        """Return the records of complete lines, the first at byte `offset` of the file; damaged ones are skipped."""
        ends = np.array([match.end() for match in _NEWLINE.finditer(chunk)], np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        numbers = np.arange(len(ends)) + self.num_lines + 1
        self.num_lines += len(ends)
        try:
            lines: list[_Line] = self._decoder.decode_lines(chunk)
        except (msgspec.DecodeError, RecursionError):
            lines = []
        if len(lines) != len(ends):
            spans = zip(starts.tolist(), ends.tolist(), numbers.tolist(), strict=True)
            parsed = [self._decode_line(bytes(chunk[a:b]), number) for a, b, number in spans]
            kept = np.array([line is not None for line in parsed], np.bool_)
            lines = [line for line in parsed if line is not None]
            starts, ends, numbers = starts[kept], ends[kept], numbers[kept]
        records = np.empty(len(lines), RECORD)
        records["offset"], records["length"], records["line"] = starts + offset, ends - starts, numbers
        self._fill(records, lines)
        return records

    def _fill(self, records: npt.NDArray[np.void], lines: list[_Line]) -> None:
        nan = float("nan")
        columns = {
            "step": [line.step for line in lines],
            "reward": [nan if line.reward is None else line.reward for line in lines],
            "tokens": [line.num_generated_tokens for line in lines],
            "turns": [line.num_turns for line in lines],
            "env": [line.env or line.task_name for line in lines],
            "stop": [line.stop_reason for line in lines],
            "failure": ["" if line.failure is None else line.failure.failure_class for line in lines],
            "generation": [line.generation_index or line.rollout_index for line in lines],
            "group": [line.group_id for line in lines],
            "prompt": [line.prompt_id for line in lines],
            "task_index": [line.task_index for line in lines],
            "seed": [line.seed for line in lines],
        }
        for name, values in columns.items():
            numbers = self.names[name].__getitem__ if name in self.names else checksum if name in ID_COLUMNS else None
            if lines and values.count(values[0]) == len(values):  # often: converted once
                records[name] = values[0] if numbers is None else numbers(values[0])
            elif numbers is None:
                records[name] = values
            elif name in self.names:
                records[name] = list(map(numbers, values))
            else:  # neighbours often share their id
                known = {each: numbers(each) for each in dict.fromkeys(values)}
                records[name] = [known[each] for each in values]

    def _decode_line(self, line: bytes, number: int) -> _Line | None:
        """Return the columns of one line, also of JSON with NaN; None for a blank or damaged one."""
        if not line.strip():
            return None
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, RecursionError):
            pass
        try:
            return msgspec.convert(parse_object(line), _Line)
        except ValueError as error:  # msgspec's errors are
            self.add_damage(number, str(error))
            return None


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; raises ValueError that says what it is instead."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"no JSON object but {type(values).__name__}")
    return values


def checksum(text: object) -> int:
    """Return the checksum by which the columns of ids hold an id."""
    return crc32(text.encode(errors="surrogatepass") if isinstance(text, str) else b"")
