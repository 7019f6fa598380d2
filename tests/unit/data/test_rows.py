"""JSON Lines: read, written, and indexed in a large file."""

import json
import os
from pathlib import Path

import pytest

from nemo_rl.data.rows import RowFile, read_jsonl
from nemo_rl.errors import DataError
from nemo_rl.experience.rollout_rows import encode_json_line

HALF_PAIRS = "high \ud83d, low \ude00 \\ud83d"


def test_a_line_holds_every_text_as_it_was(tmp_path):
    rows = [{"text": HALF_PAIRS}, {HALF_PAIRS: ["größer 😀\n\u2028\x00", None, 0.5]}]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(map(encode_json_line, rows)))
    assert list(read_jsonl(tmp_path / "rows.jsonl")) == rows
    assert encode_json_line({"text": "größer"}) == '{"text": "größer"}\n'.encode()


def test_no_number_is_refused_where_json_is_to_be_strict():
    assert encode_json_line({"loss": float("nan")}) == b'{"loss": NaN}\n'
    with pytest.raises(ValueError):
        encode_json_line({"loss": float("nan")}, allow_nan=False)


def test_the_halves_of_a_pair_side_by_side_are_the_pair():
    """Text from a JSON reader never holds them apart."""
    assert json.loads(encode_json_line({"text": "\ud83d\ude00"})) == {"text": "😀"}


TEXT = '{"a": 1}\n\n{"a": 2}\r\n  \n{"a": "ü"}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(TEXT.encode())
    return path


def test_rows_are_read_by_their_place_blank_lines_left_out(path: Path) -> None:
    file = RowFile(path)
    assert len(file) == 3
    assert file.row(2) == {"a": "ü"}
    assert list(file.rows()) == [{"a": 1}, {"a": 2}, {"a": "ü"}]
    assert list(file.rows([2, 0])) == [{"a": "ü"}, {"a": 1}]
    assert [file.location(index) for index in range(3)] == [f"{path}:1", f"{path}:3", f"{path}:5"]


def test_a_limit_takes_the_first_rows(path: Path) -> None:
    assert list(RowFile(path, limit=2).rows()) == [{"a": 1}, {"a": 2}]


def test_equal_rows_have_equal_digests_whatever_ends_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\r\n{"a": 2}\n{"a": 1}')
    first, second, third = RowFile(path).digests
    assert first == third != second


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": ', r"no valid JSON: .* at column \d"),
        (b"[1]", "a JSON object was expected, not list"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    file = RowFile(path)
    assert file.row(0) == {"a": 1}
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: {problem}"):
        file.row(1)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot be read: No such file"):
        RowFile(tmp_path / "absent.jsonl")


def test_another_size_is_noticed_at_the_next_row(path: Path) -> None:
    file = RowFile(path)
    with path.open("ab") as appended:
        appended.write(b'\n{"a": 4}')
    with pytest.raises(DataError, match=r"was changed while it is in use: it has \d+ bytes and had 34"):
        file.row(0)


def test_a_changed_row_of_the_same_length_is_noticed_and_a_mere_touch_is_not(path: Path) -> None:
    file = RowFile(path)
    os.utime(path, (1, 1))
    assert file.row(1) == {"a": 2}
    path.write_bytes(TEXT.replace("2", "3").encode())
    assert file.row(0) == {"a": 1}
    with pytest.raises(DataError, match="row 1 is not the one that was indexed"):
        file.row(1)
