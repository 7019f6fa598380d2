"""Commands that die, hang, loop or are stopped; the commands are small scripts that load no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl import durable_files
from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.jobs.supervisor import RUN, Death, Limits, RestartPolicy, Watch

ROOT = Path(__file__).parents[3]
HEAD = """
import contextlib, os, signal, subprocess, sys, time
from pathlib import Path
from nemo_rl.errors import RolloutError
from nemo_rl.observability import heartbeat
count = Path("count")
start = int(count.read_text()) if count.exists() else 0
count.write_text(str(start + 1))
Path("arguments").write_text("\\n".join(sys.argv[1:]))
"""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_death_after_progress_is_restarted_at_once_and_others_wait_longer_each_time() -> None:
    policy = RestartPolicy(Limits(restarts=9, crash_loop=9, backoff_s=2.0))
    delays = [policy.record(Death(step, "x"))[0] for step in (1, 2, 2, 2, 5)]
    assert delays == [0.0, 0.0, 2.0, 4.0, 0.0]


def test_a_crash_loop_ends_with_its_first_cause_whatever_numbers_it_names() -> None:
    policy = RestartPolicy(Limits(restarts=9, crash_loop=3))
    assert policy.record(Death(4, "killed by SIGKILL"))[0] is not None
    assert policy.record(Death(5, "ValueError: process 12"))[0] is not None
    assert policy.record(Death(5, "ValueError: process 77"))[0] is not None
    delay_s, reason = policy.record(Death(5, "ValueError: process 99"))
    assert delay_s is None
    assert reason == "crash loop, 3 times in a row after step 5; first cause: ValueError: process 12"


def test_other_causes_at_one_step_are_no_loop_but_use_up_the_restarts() -> None:
    policy = RestartPolicy(Limits(restarts=2, crash_loop=2))
    assert policy.record(Death(1, "a"))[0] is not None
    assert policy.record(Death(1, "b"))[0] is not None
    delay_s, reason = policy.record(Death(1, "a"))
    assert delay_s is None
    assert reason == "all 2 restarts (--restarts) are used; first cause: a"


def test_a_process_without_beats_or_without_progress_counts_as_hung(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "heartbeat.json"
    watch = Watch(Limits(hang_timeout_s=10, progress_timeout_s=25), path, clock=clock)

    watch.pid = 5

    def problem_at(now: float, beats: int, progress: int, pid: int = 5) -> str | None:
        state = {"pid": pid, "beats": beats, "progress": progress, "phase": "training", "step": 7}
        path.write_text(json.dumps(state))
        clock.now = now
        return watch.problem()

    assert problem_at(0.5, beats=9, progress=9, pid=4) is None  # of an earlier start that is still dying
    assert watch.step is None
    assert problem_at(1, beats=1, progress=1) is None
    assert problem_at(10, beats=2, progress=1) is None
    assert problem_at(19, beats=2, progress=1) is None
    assert problem_at(21, beats=2, progress=1) == "no sign of life for 10 s (--hang-timeout-s)"
    assert problem_at(26, beats=3, progress=2) is None
    assert problem_at(52, beats=4, progress=2) == "no progress for 25 s (--progress-timeout-s)"
    assert watch.step == 7


class Case:
    """A supervised script in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, body: str, *options: str, words: Sequence[str] = ()) -> "subprocess.Popen[str]":
        script = self.directory / "command.py"
        script.write_text(HEAD + body)
        own = ("--directory", str(self.directory / "run"), "--backoff-s", "0", *options, "--", str(script), *words)
        return subprocess.Popen(
            [sys.executable, "-m", "nemo_rl", "run", *own],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, body: str, *options: str, words: Sequence[str] = ()) -> int:
        process = self.start(body, *options, words=words)
        output, _ = process.communicate(timeout=240)
        (self.directory / "output").write_text(output)
        return process.returncode

    @property
    def events(self) -> list[dict[str, Any]]:
        path = self.directory / "run" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing happened before the deadline"
        time.sleep(0.02)


def test_a_killed_command_is_started_again_with_its_arguments_and_its_checkpoints(case: Case) -> None:
    body = """
with heartbeat.beating():
    heartbeat.record(phase="training", step=start, checkpoint_dir="/where/it/saves")
    while heartbeat.read(Path(os.environ[heartbeat.VARIABLE])).get("checkpoint_dir") is None:
        time.sleep(0.01)
    if start < 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert case.run(body, "--restarts", "2", words=("a=1",)) == 0, (case.directory / "output").read_text()
    assert [event["cause"] for event in case.named("died")] == ["killed by SIGKILL"] * 2
    assert [event["step"] for event in case.named("died")] == [0, 1]
    saved = "checkpointing.checkpoint_dir=/where/it/saves"
    assert (case.directory / "arguments").read_text().splitlines() == ["a=1", saved]
    status = json.loads((case.directory / "run/status.json").read_text())
    assert (status["state"], status["exit_code"], status["restarts"]) == ("ended", 0, 2)


def test_a_crash_loop_is_one_failure_with_the_first_cause(case: Case) -> None:
    body = """
with heartbeat.beating():
    raise RolloutError(f"of process {os.getpid()}")
"""
    assert case.run(body, "--crash-loop", "2") == 1
    assert len(case.named("started")) == 2
    [ended] = case.named("ended")
    assert ended["reason"].startswith(
        "crash loop, 2 times in a row after step 0; first cause: RolloutError: of process"
    )


def test_a_command_that_hangs_after_its_error_died_of_that_error(case: Case) -> None:
    body = """
if start == 0:
    with contextlib.suppress(RolloutError), heartbeat.beating():
        raise RolloutError("of the stack")
    time.sleep(600)
"""
    assert case.run(body, "--hang-timeout-s", "5") == 0
    assert [event["cause"] for event in case.named("died")] == ["RolloutError: of the stack"]


def test_user_code_that_ends_the_command_is_named_even_where_it_says_that_all_is_done(case: Case) -> None:
    body = """
from nemo_rl.observability.user_code_record import USER_CODE
with heartbeat.beating():
    USER_CODE.open(Path.cwd())
    heartbeat.record(phase="training", step=start, checkpoint_dir=str(Path.cwd()))
    while heartbeat.read(Path(os.environ[heartbeat.VARIABLE])).get("checkpoint_dir") is None:
        time.sleep(0.01)
    time.sleep(0.5)
    USER_CODE.begin("rewards:short")
    if start < 2:
        os._exit(start)
    USER_CODE.close()
    sys.exit(130)
"""
    assert case.run(body, "--restarts", "2") == 130, (case.directory / "output").read_text()
    named = "user code in flight: rewards:short (`isolated: true` in its entry of env keeps it apart)"
    assert [event["cause"] for event in case.named("died")] == [f"exit code 0; {named}", f"exit code 1; {named}"]
    [ended] = case.named("ended")
    assert ended["reason"].endswith(
        "no signal came through the supervisor; user code that was called last: rewards:short"
    )


def test_bad_input_is_not_tried_again(case: Case) -> None:
    assert case.run("sys.exit(2)") == 2
    assert len(case.named("started")) == 1


def test_a_stopped_command_is_noticed_and_killed(case: Case) -> None:
    body = """
if start == 0:
    with heartbeat.beating():
        heartbeat.record(phase="training", step=1)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
"""
    assert case.run(body, "--hang-timeout-s", "10") == 0
    assert [event["cause"] for event in case.named("died")] == ["no sign of life for 10 s (--hang-timeout-s)"]


def test_nothing_that_a_dead_command_started_stays(case: Case) -> None:
    body = """
if start == 0:
    sleeper = "import os, time; os.setsid(); open('orphan', 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", sleeper])
    while not Path("orphan").exists() or not Path("orphan").read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert case.run(body) == 0
    assert [event["processes_ended"] for event in case.named("died")] == [1]
    assert not psutil.pid_exists(int((case.directory / "orphan").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_command_whose_exit_code_ends_the_supervision(case: Case, number: int) -> None:
    body = """
def stop(number, frame):
    Path("signal").write_text(str(number))
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGHUP, stop)
Path("ready").touch()
time.sleep(600)
"""
    process = case.start(body)
    wait_for((case.directory / "ready").exists)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert (case.directory / "signal").read_text() == str(int(number))
    assert len(case.named("started")) == 1


def test_a_command_that_ignores_the_signal_is_killed_at_its_deadline(case: Case) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("ready").touch()
time.sleep(600)
"""
    process = case.start(body, "--stop-timeout-s", "1")
    wait_for((case.directory / "ready").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert [event["cause"] for event in case.named("died")] == ["not ended 1 s after a signal (--stop-timeout-s)"]


def test_the_death_of_the_process_that_starts_the_command_is_a_restart(case: Case) -> None:
    body = """
if start == 0:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
"""
    assert case.run(body) == 0
    assert len(case.named("started")) == 2


def test_the_death_of_the_supervisor_ends_the_command(case: Case) -> None:
    body = """
Path("pid").write_text(str(os.getpid()))
Path("ready").touch()
time.sleep(600)
"""
    process = case.start(body)
    wait_for((case.directory / "ready").exists)
    command = psutil.Process(int((case.directory / "pid").read_text()))
    process.kill()
    process.wait(timeout=60)
    wait_for(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--restarts", "-1", "--", "grpo"], "--restarts = -1: must be at least 0"),
        (["--hang-timeout-s", "nan", "--", "grpo"], "--hang-timeout-s = nan: must be > 0"),
        (["--restarts", "1"], "COMMAND = None: missing"),
    ],
)
def test_bad_options_are_refused_by_name(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl.cli import run

    monkeypatch.chdir(tmp_path)
    assert run(["run", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_directory_of_another_supervisor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durable_files, "LOCK_WAIT_S", 0.0)
    with durable_files.hold_directory(tmp_path, key="key"):
        assert run_command(RUN, ["--directory", str(tmp_path), "--", "grpo"]) == ExitCode.BAD_INPUT
    assert f"--directory = {str(tmp_path)!r}: in use by process {os.getpid()} on " in capsys.readouterr().err
