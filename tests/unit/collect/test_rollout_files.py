"""Append-only lines after a kill, and files that appear whole."""

import json
import subprocess
import sys

import pytest

from nemo_rl.collect.rollout_files import AppendOnlyFile, RolloutLine, atomic_write, read_lines
from nemo_rl.errors import ConfigError, DataError

FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from nemo_rl.collect.rollout_files import AppendOnlyFile
from nemo_rl.errors import RolloutError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = AppendOnlyFile(Path(sys.argv[1]))
lines.append(b'{"first": 1}\\n')
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
try:
    lines.append(b'{"text": "' + b"x" * 100_000 + b'"}\\n')
except RolloutError as error:
    print(error)
lines.append(b'{"second": 2}\\n')
lines.close()
"""

FORK = """
import os, sys
from pathlib import Path
from nemo_rl.collect.rollout_files import AppendOnlyFile

path = Path(sys.argv[1])
lines = AppendOnlyFile(path)
reading, writing = os.pipe()
has_started, begins = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.write(begins, b"x")
    os.read(reading, 1)  # lives until the parent has opened the file again
    os._exit(0)
os.read(has_started, 1)
lines.append(b'{"first": 1}\\n')
lines.close()
again = AppendOnlyFile(path)
again.close()
os.close(writing)
os.waitpid(child, 0)
print("opened again")
"""


def run(script: str, path) -> str:
    return subprocess.run([sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True).stdout


def test_a_line_that_the_disk_takes_in_part_leaves_no_part(tmp_path):
    assert run(FULL_DISK, tmp_path / "a.jsonl") == f"{tmp_path}/a.jsonl: cannot be written: File too large\n"
    assert (tmp_path / "a.jsonl").read_text() == '{"first": 1}\n{"second": 2}\n'


def test_a_fork_that_lives_on_holds_no_lock(tmp_path):
    assert run(FORK, tmp_path / "a.jsonl") == "opened again\n"


def test_a_file_is_opened_once(tmp_path):
    lines = AppendOnlyFile(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"a.jsonl is being written to"):
        AppendOnlyFile(tmp_path / "a.jsonl")
    lines.close()
    AppendOnlyFile(tmp_path / "a.jsonl").close()


def test_a_file_without_a_directory_is_one_message(tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        AppendOnlyFile(tmp_path / "nowhere" / "a.jsonl")


def test_lines_are_found_by_key_and_place(tmp_path):
    row = {"task_index": 12, "rollout_index": 3, "seed": 7}
    whole = [json.dumps({**row, "text": "ü"}), json.dumps({"text": 1, **row}), json.dumps(row)]
    (tmp_path / "a.jsonl").write_text("\n".join(whole) + '\n{"task_index": 12, "ro', "utf-8")
    found = list(read_lines(tmp_path / "a.jsonl"))
    sizes = [len(line.encode()) + 1 for line in whole]
    assert found == [
        RolloutLine(12, 3, 7, 0, sizes[0]),
        RolloutLine(12, 3, 7, sizes[0], sizes[1]),
        RolloutLine(12, 3, 7, sizes[0] + sizes[1], sizes[2]),
    ]


@pytest.mark.parametrize(
    "line", ['{"task_index": 1, "rollout_index": 0, "seed": 0, "cut', "[]", '{"task_index": 1}', ""]
)
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"task_index": 0, "rollout_index": 0, "seed": 0}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a.jsonl:2: no rollout"):
        list(read_lines(tmp_path / "a.jsonl"))


def test_the_file_appears_at_the_end(tmp_path):
    path = tmp_path / "directory" / "a.json"
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
