"""Files that appear whole or not at all."""

import pytest

from nemo_rl.collect.files import atomic_write


def test_the_file_appears_at_the_end(tmp_path):
    path = tmp_path / "folder" / "a.json"
    with atomic_write(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"before")
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.write("no bytes")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_bytes() == b"before"
