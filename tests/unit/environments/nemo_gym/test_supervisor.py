"""Nothing of a supervised command is left, however the command or its starter ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.environments.nemo_gym import supervisor
from tests.unit.environments.nemo_gym.processes import is_alive, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted by Linux's prctl")

# A command that starts a process in a session of its own, whose parent ends, and writes down all their ids.
COMMAND = """
import os, signal, subprocess, sys, time
orphan = '''import subprocess as s
print(s.Popen(["sleep", "600"], stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True).pid)'''
first = subprocess.run([sys.executable, "-c", orphan], capture_output=True, text=True).stdout.strip()
second = subprocess.Popen(["sleep", "600"]).pid
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {first} {second}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
if sys.argv[2] == "ends":
    sys.exit(7)
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(600)
"""
STARTER = """
import subprocess, sys
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True).wait()
"""


def command(file: Path, manner: str) -> list[str]:
    return [sys.executable, "-I", supervisor.__file__, sys.executable, "-c", COMMAND, str(file), manner]


def pids_in(file: Path) -> list[int]:
    wait_until("the command runs", file.exists)
    return [int(pid) for pid in file.read_text().split()]


def all_gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


def test_a_command_that_ends_takes_its_orphans_along_and_its_status_is_told(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path / "pids", "ends"), stdin=subprocess.PIPE) as process:
        assert process.wait(timeout=120) == 7
    assert all_gone(pids_in(tmp_path / "pids"))


def test_a_closed_pipe_ends_everything(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path / "pids", "stays"), stdin=subprocess.PIPE) as process:
        pids = pids_in(tmp_path / "pids")
        assert all(map(is_alive, pids))
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert all_gone(pids)


def test_the_death_of_the_starter_ends_everything(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *command(tmp_path / "pids", "stays")])
    pids = pids_in(tmp_path / "pids")
    starter.kill()
    starter.wait()
    wait_until("the command and its orphans are gone", lambda: all_gone(pids))


def test_a_command_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "impatient.py"
    script.write_text(
        Path(supervisor.__file__).read_text().replace("INTERRUPT_GRACE_S = 10.0", "INTERRUPT_GRACE_S = 0.2")
    )
    starting = command(tmp_path / "pids", "deaf")
    starting[2] = str(script)
    with subprocess.Popen(starting, stdin=subprocess.PIPE) as process:
        pids = pids_in(tmp_path / "pids")
        process.communicate(timeout=120)
    assert all_gone(pids)


def test_the_death_of_the_supervisor_ends_the_command(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path / "pids", "stays"), stdin=subprocess.PIPE) as process:
        pids = pids_in(tmp_path / "pids")
        process.kill()
    wait_until("the command is gone", lambda: not is_alive(pids[0]))
    for pid in pids[1:]:  # these nobody could follow but by their environment: test_stack.py
        os.kill(pid, signal.SIGKILL)
