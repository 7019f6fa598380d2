"""Files that appear whole or not at all."""

import pytest

from nemo_rl.collect.whole_file import whole_file


def test_the_file_appears_at_the_end(tmp_path):
    path = tmp_path / "folder" / "a.json"
    with whole_file(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), whole_file(path) as file:
        file.write("no bytes")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"before"
