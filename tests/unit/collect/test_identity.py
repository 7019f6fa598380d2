"""What a shard is of."""

import pytest

from nemo_rl.collect.shards import MAX_DIFFERENCES_SHOWN, Chunk, KeySpace, ShardIdentity, describe_identity_differences
from nemo_rl.errors import DataError


@pytest.mark.parametrize("chunk", [None, Chunk(0, 1), Chunk(2, 3)])
def test_an_identity_is_read_as_it_was_written(tmp_path, chunk):
    identity = ShardIdentity(3, KeySpace(10, 2, chunk), {"config": {"a": [1, None]}, "model": "größer"})
    identity.write(tmp_path / "i.json")
    assert ShardIdentity.read(tmp_path / "i.json") == identity
    identity.check(tmp_path / "i.json")


def test_differences_name_nested_keys():
    before = {"a": {"b": 1, "c": {}}, "same": [1]}
    now = {"a": {"b": 2, "d": None}, "same": [1]}
    assert describe_identity_differences(before, now).splitlines() == [
        "  a.b: was 1, is 2",
        "  a.c: was {}, is not set",
        "  a.d: was not set, is None",
    ]
    assert describe_identity_differences(now, now) == ""


def test_many_differences_are_cut():
    lines = describe_identity_differences({}, {str(n): n for n in range(MAX_DIFFERENCES_SHOWN + 5)}).splitlines()
    assert (len(lines), lines[-1]) == (MAX_DIFFERENCES_SHOWN + 1, "  and 5 more")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"chunk": 3, "num_chunks": 2, "num_tasks": 1, "num_repeats": 1}'])
def test_a_file_that_is_no_identity_is_refused(tmp_path, text):
    (tmp_path / "i.json").write_text(text)
    with pytest.raises(DataError, match=r"i.json: is not the identity"):
        ShardIdentity.read(tmp_path / "i.json")
