"""`nemo-rl run --restarts N -- grpo ...`: a training command that is started again when it dies or hangs.

The supervisor owns one command at a time. Consumes: its end, its heartbeat (observability/heartbeat.py), SIGTERM,
SIGINT and SIGHUP. Produces: starts, `status.json`, one line of `events.jsonl` and of the log per event. Waits for: the
command, with a deadline for each sign of life. A restart has the same arguments and resumes from the command's
checkpoints.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.config.recipe_files import COMMANDS
from nemo_rl.durable_files import hold_directory
from nemo_rl.environments.nemo_gym.supervisor import PR_SET_CHILD_SUBREAPER, descendants
from nemo_rl.errors import ConfigError, NemoRLError
from nemo_rl.jobs.preload import STOP_SIGNALS
from nemo_rl.observability import heartbeat, user_code_record
from nemo_rl.observability.console import configure_logging, make_run_directory

logger = logging.getLogger(__name__)

POLL_S = 0.1
END_S = 30.0  # deadline for killed processes to disappear
MAX_BACKOFF_S = 60.0
# Modules that a restart needs first; those that the first start has loaded when training begins follow.
PRELOADED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("grpo", "distill"), ("nemo_rl.launch.training",)),
    **dict.fromkeys(("sft", "dpo"), ("nemo_rl.launch.supervised_training",)),
}
CHECKPOINT_DIR_KEY = "checkpointing.checkpoint_dir"
DESCRIPTION = """Run a training command, and start it again from its checkpoint when it dies or hangs.

nemo-rl run --restarts 10 -- grpo --config recipe.yaml checkpointing.save_period=1

Exit codes 0, 2 and 130 of the command end the supervision with the same code; every other end is a reason to restart,
until the restarts are used or a crash loop is recognised."""
TIMEOUTS = {
    "hang_timeout_s": "without a sign of life of the process, before it is killed",
    "progress_timeout_s": "without a rollout, step or validation, before it is killed",
    "stop_timeout_s": "for the command to save and end after SIGTERM, SIGINT or SIGHUP",
    "backoff_s": "before a restart that follows no progress; doubles",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits after which a command is given up or counts as hung."""

    restarts: int = 10
    crash_loop: int = 3  # deaths at the same step of the same cause
    backoff_s: float = 1.0  # before a restart without progress since the last; doubles
    hang_timeout_s: float = 120.0  # longest time without a beat; then the process is stopped or frozen
    progress_timeout_s: float = 3600.0  # longest time without a rollout, step, validation or checkpoint
    stop_timeout_s: float = 600.0  # time for the command to save and end after a signal


@dataclass(frozen=True, slots=True)
class Death:
    """The unexpected end of a command."""

    step: int  # the last that was trained
    cause: str

    @property
    def site(self) -> tuple[int, str]:
        """Return step and cause without numbers such as process ids: they repeat in a crash loop."""
        return self.step, re.sub(r"\d+", "#", self.cause)


@dataclass(slots=True)
class RestartPolicy:
    """Decides after each death: how long to wait before the restart, or why to end."""

    limits: Limits
    deaths: list[Death] = field(default_factory=list)

    def record(self, death: Death) -> tuple[float | None, str]:
        """Return the seconds to wait, or None with the reason to end.

        Example: with `crash_loop` 3 the third death in a row at step 15 by "ValueError: x" ends the run with it.
        """
        self.deaths.append(death)
        alike = self._last_in_a_row(lambda other: other.site == death.site)
        if len(alike) >= self.limits.crash_loop:
            where = f"{len(alike)} times in a row after step {death.step}"
            return None, f"crash loop, {where}; first cause: {alike[0].cause}"
        if len(self.deaths) > self.limits.restarts:
            return (
                None,
                f"all {self.limits.restarts} restarts (--restarts) are used; first cause: {self.deaths[0].cause}",
            )
        without_progress = len(self._last_in_a_row(lambda other: other.step == death.step)) - 1
        if without_progress == 0:
            return 0.0, ""
        return min(MAX_BACKOFF_S, self.limits.backoff_s * 2 ** (without_progress - 1)), ""

    def _last_in_a_row(self, fits: Callable[[Death], bool]) -> list[Death]:
        count = next((i for i, death in enumerate(reversed(self.deaths)) if not fits(death)), len(self.deaths))
        return self.deaths[len(self.deaths) - count :]


class Watch:
    """Signs of life of one start: when its heartbeat last changed, by this process's clock."""

    def __init__(self, limits: Limits, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pid: int | None = None  # process of the command; heartbeats of others are stale
        self._limits, self._path, self._clock = limits, path, clock
        self._beat_at = self._progress_at = clock()
        self.state: Mapping[str, Any] = {}

    @property
    def step(self) -> int | None:
        """Return the last trained step; None if training has not begun."""
        return self.state.get("step") if self.state.get("phase") == "training" else None

    def problem(self) -> str | None:
        """Read the heartbeat; return why the command counts as hung, None if it is alive."""
        state, now = heartbeat.read(self._path), self._clock()
        if state.get("pid") != self.pid:
            state = {}
        if state.get("beats") != self.state.get("beats"):
            self._beat_at = now
        if state.get("progress") != self.state.get("progress"):
            self._progress_at = now
        self.state = state or self.state
        if state and now - self._beat_at > self._limits.hang_timeout_s:
            return f"no sign of life for {self._limits.hang_timeout_s:g} s (--hang-timeout-s)"
        if now - self._progress_at > self._limits.progress_timeout_s:
            return f"no progress for {self._limits.progress_timeout_s:g} s (--progress-timeout-s)"
        return None


class PreloaderDied(NemoRLError):
    """The process that starts commands has ended, and with it the command."""


class Launcher:
    """Starts commands through preload.py and tells when they end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = self._command = -1
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """Return the preloading process, which outlives its commands."""
        return None if self._process is None else self._process.pid

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        if self._process is None:
            self._answers, theirs = os.pipe()
            words = [sys.executable, "-m", "nemo_rl.jobs.preload", str(theirs)]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[theirs], start_new_session=True)
            os.close(theirs)
        self._send({"start": list(command), "environment": dict(environment)})
        while (answer := self._receive(END_S)) is not None:
            if "status" not in answer:  # else the end of a command that was killed
                self._command = answer["pid"]
                return self._command
        raise PreloaderDied(f"the process that starts the command did not answer in {END_S:g} s")

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules for the next start, while this one runs."""
        self._send({"import": list(modules)})

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status of the command; None if it still runs after `timeout_s`."""
        answer = self._receive(timeout_s)
        return None if answer is None or answer["pid"] != self._command else answer["status"]

    def close(self) -> None:
        """End the preloading process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._answers)
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process, self._unread = None, b""

    def _send(self, request: Mapping[str, Any]) -> None:
        stdin = None if self._process is None else self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise PreloaderDied(f"the process that starts the command has ended: {error}") from error

    def _receive(self, timeout_s: float) -> dict[str, int] | None:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            try:
                readable, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            except InterruptedError:
                return None
            if not readable:
                return None
            if not (data := os.read(self._answers, 1 << 16)):
                raise PreloaderDied("the process that starts the command has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


class Supervisor:
    """One supervised command: `run` returns the exit code once it is done, given up, or stopped by a signal."""

    def __init__(self, command: Sequence[str], limits: Limits, directory: Path) -> None:
        self._command, self._limits, self._directory = list(command), limits, directory
        self._policy = RestartPolicy(limits)
        self._launcher = Launcher()
        self._heartbeat_path = directory / "heartbeat.json"
        self._status: dict[str, Any] = {"state": "starting", "restarts": 0, "step": 0, "pid": None}
        self._pid: int | None = None
        self._signalled_at: float | None = None
        self._is_stopped_early = False  # the signal had no command to go to

    def run(self) -> ExitCode:
        """Start the command until it is done."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the command become children of this
        numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._forward) for number in numbers}
        try:
            while True:
                code = self._run_once()
                if code is not None:
                    return code
        finally:
            self._launcher.close()
            self._end_processes()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_once(self) -> ExitCode | None:
        """Start the command and wait for its end; return the exit code, None to start it again."""
        self._heartbeat_path.unlink(missing_ok=True)
        watch = Watch(self._limits, self._heartbeat_path)
        try:
            status, problem = self._start_and_watch(watch)
        except PreloaderDied as error:
            self._launcher.close()
            status, problem = None, str(error)
        self._pid = None
        self._status["step"] = max(self._status["step"], watch.step or 0)
        num_left = self._end_processes()
        seen = user_code_record.read(Path(watch.state.get("checkpoint_dir", "")) / user_code_record.FILE)
        is_end = status in (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.INTERRUPTED)
        if problem is None and is_end and not seen.in_flight:
            reason = str(watch.state.get("error", ExitCode(status).meaning))
            if status == ExitCode.INTERRUPTED and self._signalled_at is None and seen.last:
                reason += f"; no signal came through the supervisor; user code that was called last: {seen.last}"
            return self._end(ExitCode(status), reason, num_left)
        error = watch.state.get("error")  # reported by the command, which may hang after it
        cause = str(error or problem or _describe_status(status))
        if seen.in_flight and not error:
            cause += f"; user code in flight: {seen.in_flight} (`isolated: true` in its entry of env keeps it apart)"
        death = Death(self._status["step"] if watch.step is None else watch.step, cause)
        self._note("died", logging.ERROR, step=death.step, cause=death.cause, processes_ended=num_left)
        if self._signalled_at is not None:
            return self._end(ExitCode.INTERRUPTED, death.cause, num_left)
        return self._restart_after(death, watch)

    def _restart_after(self, death: Death, watch: Watch) -> ExitCode | None:
        delay_s, reason = self._policy.record(death)
        if delay_s is None:
            return self._end(ExitCode.FAILED, reason, 0)
        if directory := watch.state.get("checkpoint_dir"):
            self._resume_from(directory)
        self._status["restarts"] += 1
        self._note("restarting", logging.WARNING, restart=self._status["restarts"], wait_s=delay_s)
        deadline = time.monotonic() + delay_s
        while time.monotonic() < deadline and self._signalled_at is None:
            time.sleep(min(POLL_S, delay_s))
        if self._signalled_at is not None:
            return self._end(ExitCode.INTERRUPTED, death.cause, 0)
        return None

    def _resume_from(self, checkpoint_dir: str) -> None:
        """Append the checkpoint directory of the first start, unless the command names one."""
        if not any(word.lstrip("+").startswith(f"{CHECKPOINT_DIR_KEY}=") for word in self._command):
            self._command.append(f"{CHECKPOINT_DIR_KEY}={checkpoint_dir}")

    def _start_and_watch(self, watch: Watch) -> tuple[int | None, str | None]:
        """Return the exit status, or why the command was taken for hung and killed."""
        self._pid = self._launcher.start(self._command, {heartbeat.VARIABLE: str(self._heartbeat_path)})
        watch.pid = self._pid
        self._note("started", logging.INFO, pid=self._pid, command=self._command)
        self._launcher.preload(PRELOADED.get(self._command[0], ()))
        is_training = False
        while True:
            status = self._launcher.wait(POLL_S)
            problem = watch.problem()
            if watch.step is not None and not is_training:
                is_training = True
                self._note("training", logging.INFO, step=watch.step)
                self._launcher.preload(heartbeat.read_modules(self._heartbeat_path))
            if status is not None:
                return status, None
            if problem is None and self._signalled_at is not None:
                problem = self._overdue()
            if problem is not None:
                return None, problem

    def _overdue(self) -> str | None:
        assert self._signalled_at is not None
        if self._is_stopped_early:
            return "a signal came during its start, before there was anything to save"
        limit_s = self._limits.stop_timeout_s
        is_late = time.monotonic() - self._signalled_at > limit_s
        return f"not ended {limit_s:g} s after a signal (--stop-timeout-s)" if is_late else None

    def _end_processes(self) -> int:
        """Kill the command and all its descendants; return their number."""
        ended: set[int] = set()
        deadline = time.monotonic() + END_S
        while left := set(descendants(os.getpid())) - {self._launcher.pid}:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended |= left
            if time.monotonic() > deadline:
                logger.error("processes do not end: %s", sorted(left))
                break
            self._reap(ended)
            time.sleep(0.02)
        self._reap(ended)
        return len(ended)

    def _reap(self, pids: set[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ChildProcessError):  # a child of the preloading process, or gone
                os.waitpid(pid, os.WNOHANG)

    def _forward(self, number: int, frame: object) -> None:
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
        if self._pid is None:
            self._is_stopped_early = True
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _end(self, code: ExitCode, reason: str, num_left: int) -> ExitCode:
        level = logging.INFO if code in (ExitCode.DONE, ExitCode.INTERRUPTED) else logging.ERROR
        self._note("ended", level, exit_code=int(code), reason=reason, processes_ended=num_left)
        return code

    def _note(self, event: str, level: int, **values: Any) -> None:
        """Write one event to the log, to events.jsonl and to status.json."""
        shown = ", ".join(f"{name}: {value}" for name, value in values.items() if name != "command")
        logger.log(level, "%s%s", event, f" ({shown})" if shown else "")
        now = {"time": time.time(), "monotonic_s": time.monotonic(), "event": event}
        self._status |= {"state": event, **{key: value for key, value in values.items() if key != "command"}}
        with contextlib.suppress(OSError):  # a full disk does not end the supervision
            with (self._directory / "events.jsonl").open("a") as file:
                file.write(json.dumps(now | values) + "\n")
            draft = self._directory / "status.json.tmp"
            draft.write_text(json.dumps(self._status, indent=1) + "\n")
            os.replace(draft, self._directory / "status.json")


def _describe_status(status: int | None) -> str:
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit code {status}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Limits()
    parser.add_argument("--restarts", type=int, default=defaults.restarts, help="at most; default %(default)s")
    crash_help = "deaths in a row at the same step of the same cause that end the run; default %(default)s"
    parser.add_argument("--crash-loop", type=int, default=defaults.crash_loop, help=crash_help)
    for name, what in TIMEOUTS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=getattr(defaults, name), help=f"seconds {what}")
    parser.add_argument(
        "--directory", type=path_argument, help="of status.json and events.jsonl; default: the next runs/exp_N"
    )
    parser.epilog = "after --: the command, as `grpo ...`, or a script.py with its arguments"


def _run(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    names = ("restarts", "crash_loop", *TIMEOUTS)
    for name in names:
        value, may_be_zero = getattr(parsed, name), name in ("restarts", "backoff_s")
        if not (value >= 0 if may_be_zero else value > 0):
            problem = "must be at least 0" if may_be_zero else "must be > 0"
            raise ConfigError(f"--{name.replace('_', '-')}", value, problem)
    if not parsed.command:
        raise ConfigError("COMMAND", None, "missing: nemo-rl run --restarts 10 -- grpo --config recipe.yaml")
    _check_command(parsed.command[0])
    directory = parsed.directory or make_run_directory("runs")
    limits = Limits(**{name: getattr(parsed, name) for name in names})
    with hold_directory(directory, key="--directory"):
        logger.info("supervised; status and events are in %s", directory)
        return Supervisor(parsed.command, limits, directory.absolute()).run()


def _check_command(name: str) -> None:
    """Raise ConfigError for a command that could never start."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ConfigError("COMMAND", name, f"no such file (from {Path.cwd()})")
    elif name not in COMMANDS.values():
        raise ConfigError("COMMAND", name, "must be a script.py or one of these commands", known=COMMANDS.values())


RUN = Command(DESCRIPTION, _add_arguments, _run, program="nemo-rl run", takes_command=True)
