import json

import pytest

from nemo_rl.data.rows import encode_json_line, read_jsonl

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
