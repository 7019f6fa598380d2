"""JSON Lines: files read with the place of every fault, and lines written without losing any text."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.errors import DataError


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the file's JSON objects in order; blank lines are skipped.

    Raises DataError naming file:line for a line that is no JSON object, and naming the file when it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_object(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error.reason}") from error


def encode_json_line(values: Mapping[str, Any], *, allow_nan: bool = True) -> bytes:
    """`values` as one line of UTF-8 with its newline.

    Half a surrogate pair, which a message may hold and UTF-8 cannot, stands as its JSON escape: Python's json reads it
    back as it was, while stricter readers (orjson) refuse such a line. ValueError without `allow_nan` for NaN.
    """
    text = json.dumps(values, ensure_ascii=False, allow_nan=allow_nan)
    return (text + "\n").encode("utf-8", errors="backslashreplace")  # only surrogates cannot be encoded


def _parse_object(line: str, location: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{location}: no valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise DataError(f"{location}: a JSON object was expected, not {type(row).__name__}")
    return row
