"""A directory that one process writes at a time, and lines that are whole or absent."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.durable_files import hold_directory
from nemo_rl.errors import ConfigError

HOLD = """
import sys, time
from pathlib import Path
from nemo_rl.durable_files import hold_directory
with hold_directory(Path(sys.argv[1]), key="checkpointing.checkpoint_dir"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_directory_in_use_is_refused_with_its_holder(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="wait until it ends, end it, or choose another directory") as error,
        hold_directory(tmp_path, key="checkpointing.checkpoint_dir", wait_s=0.2),
    ):
        pass
    text = str(error.value)
    assert text.startswith(f"checkpointing.checkpoint_dir = {str(tmp_path)!r}: in use by process {holder.pid} on ")
    assert f"on {socket.gethostname()} since 20" in text


def test_killed_holder_does_not_block(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    with hold_directory(tmp_path, key="key", wait_s=0):
        pass


def test_holder_that_ends_soon_is_waited_for(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {holder.pid}"]).wait(5)
    with hold_directory(tmp_path, key="key", wait_s=30):
        pass


def test_directory_is_held_once_and_again_after_its_end(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with (
        hold_directory(made, key="key"),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"),
        hold_directory(made, key="key", wait_s=0),
    ):
        pass
    with hold_directory(made, key="key", wait_s=0):
        pass


def test_fork_that_lives_on_holds_nothing(tmp_path: Path) -> None:
    script = """
import os, sys, time
from pathlib import Path
from nemo_rl.durable_files import hold_directory
with hold_directory(Path(sys.argv[1]), key="key"):
    child = os.fork()
    if not child:
        time.sleep(600)
try:
    with hold_directory(Path(sys.argv[1]), key="key"):
        print("held again")
finally:
    os.kill(child, 9)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "held again\n"


def test_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened"), hold_directory(tmp_path / "file", key="key"):
        pass


def test_data_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    script = """
import os, resource, signal, sys
from nemo_rl.durable_files import append_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
append_whole(file, b"first\\n")
try:
    append_whole(file, b"second\\n")
except OSError as error:
    print(error.strerror)
append_whole(file, b"3rd\\n")
"""
    path = tmp_path / "lines"
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout == "File too large\n"
    assert path.read_text() == "first\n3rd\n"
