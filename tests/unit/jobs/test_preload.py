"""The process that starts commands by fork: modules are imported once, ends are reported."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


class Preloader:
    def __init__(self) -> None:
        self._answers, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nemo_rl.jobs.preload", str(theirs)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        os.close(theirs)
        self._file = os.fdopen(self._answers)

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, int]:
        return json.loads(self._file.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self._file.close()


@pytest.fixture
def preloader() -> Iterator[Preloader]:
    running = Preloader()
    yield running
    running.close()


def test_commands_find_what_was_imported_and_their_ends_are_told(preloader: Preloader, tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    text = "import os, sys\nopen(sys.argv[1], 'w').write(f\"{'wave' in sys.modules} {os.environ['A']}\")\n"
    script.write_text(text + "sys.exit(len(sys.argv))\n")
    preloader.send(**{"import": ["wave", "no.such.module"]})
    for number in (1, 2):  # modules are imported between requests
        preloader.send(start=[str(script), str(tmp_path / "out"), "x"], environment={"A": f"b{number}"})
        started = preloader.receive()
        assert preloader.receive() == {"pid": started["pid"], "status": 3}
    assert (tmp_path / "out").read_text() == "True b2"


def test_a_killed_command_has_its_signal_as_status(preloader: Preloader, tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    preloader.send(start=[str(script)], environment={})
    started = preloader.receive()
    assert preloader.receive() == {"pid": started["pid"], "status": -9}


PROGRAM = """
import os, signal, sys
from nemo_rl.jobs import preload
prepare = preload.prepare

def signalled_before_prepare():
    os.kill(os.getpid(), signal.SIGTERM)  # between the fork and the command's own handling of signals
    prepare()

preload.prepare = {prepare}
{more}
sys.argv = ["preload", *sys.argv[1:]]
preload.main()
"""


def run_program(directory: Path, command: str, *, prepare: str = "prepare", more: str = "") -> tuple[int, int]:
    """Run one command through a preloader in which `more` was executed; return its process id and its exit status."""
    script = directory / "command.py"
    script.write_text(command)
    answers, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(prepare=prepare, more=more), str(theirs)],
        stdin=subprocess.PIPE,
        pass_fds=[theirs],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    assert process.stdin is not None
    process.stdin.write(json.dumps({"start": [str(script)], "environment": {}}).encode() + b"\n")
    process.stdin.flush()
    with os.fdopen(answers) as file:
        started, ended = json.loads(file.readline()), json.loads(file.readline())
    process.stdin.close()
    assert process.wait(60) == 0
    assert ended["pid"] == started["pid"]
    return ended["pid"], ended["status"]


WITH_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"


def test_a_thread_that_an_import_has_started_is_not_lost_in_a_fork(tmp_path: Path) -> None:
    command = "import sys, threading\nsys.exit(40 + threading.active_count())\n"
    assert run_program(tmp_path, command, more=WITH_THREAD)[1] == 41


def test_a_signal_between_the_fork_and_the_command_ends_the_command(tmp_path: Path) -> None:
    assert run_program(tmp_path, "", prepare="signalled_before_prepare")[1] == -signal.SIGTERM


def test_a_command_can_be_signalled_and_blocks_nothing(tmp_path: Path) -> None:
    command = "import os, signal\nassert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\nos.kill(os.getpid(), 15)\n"
    assert run_program(tmp_path, command)[1] == -signal.SIGTERM
    assert run_program(tmp_path, command, more=WITH_THREAD)[1] == -signal.SIGTERM
