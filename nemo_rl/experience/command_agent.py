"""Agents that are a command line.

A `CommandAgent` reads its prompt from standard input and reports on a descriptor of its own. A `HarnessAgent` is a
program as it comes, which gets its prompt by templates (environments/harness.py) and reports nothing.

The policy's processes are children of the program, and often share its descriptors, environment and user. Nothing that
they hold or can read again opens a reward: the prompt and the report key come once, through a pipe; a report counts
only with that key; the socket it is written to cannot be reopened through /proc.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nemo_rl.data.messages import to_openai_message
from nemo_rl.distributed.processes import find_processes
from nemo_rl.environments.harness import OWN_VARIABLES, Harness, HarnessConfig, Places, fill
from nemo_rl.environments.sandbox import temporary_directory
from nemo_rl.experience.cancellation import cancel_all
from nemo_rl.tracing import trace_environment
from nemo_rl.types import AgentResult, Prompt

INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")
REPORT_VARIABLE = "NEMO_RL_REPORT_FD"
RUN_VARIABLE = "NEMO_RL_AGENT_RUN"  # a run's id in the environment of each of its processes, to find them
MAX_KILLS = 10  # times that the processes of a run are looked for: what they start meanwhile is found by the next
KEY_BYTES = 32
MAX_REPORT_BYTES = 256 * 1024  # more than a socket accepts in one write by default
MAX_QUEUED_REPORTS = 1024  # read after the program has exited
STDERR_TAIL_BYTES = 64 * 1024  # end of a program's standard error that is read


class CommandError(Exception):
    """A program that exited with a nonzero status (the message ends with its standard error), or an invalid report."""


class CommandAgent:
    """One process per run, which is killed with all that it started when the run ends in whatever way.

    The program finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment and one JSON object on its standard input:
    `prompt_id`, `messages`, `env_state`, `tools` and `report_key`. To report, it writes one JSON object, in a single
    write, to the file descriptor NEMO_RL_REPORT_FD: `report_key` and any of `reward` (a number), `rewards` (numbers by
    name), `call_rewards` (numbers by name, by completion id) and `answer`. The last report counts.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        inherited_variables: Sequence[str] = (),
        env_state_fields: Sequence[str] | None = None,
    ) -> None:
        """`variables` are templates; `env_state_fields`: those that the program reads; None: all."""
        self._name = name
        self._command = tuple(command)
        self._own = OWN_VARIABLES | dict(variables or {})
        self._inherited = (*INHERITED_VARIABLES, *inherited_variables)
        self._fields = env_state_fields

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        key = secrets.token_urlsafe(KEY_BYTES)
        asked = json.dumps({**prompt_to_dict(prompt, self._fields), "report_key": key}, default=str).encode()
        with _open_reports(key) as reports:
            session = {"base_url": base_url, "api_key": api_key}
            own = {name: fill(text, session) for name, text in self._own.items()}
            environment = inherit(self._inherited) | own | {REPORT_VARIABLE: str(reports.sender)}
            argv = [fill(text, session) for text in self._command]
            await run_program(argv, environment, written=asked, pass_fds=(reports.sender,))
            return parse_report(self._name, reports.read_last())


class HarnessAgent:
    """One process per run of a harness, in directories of its own that are removed after it."""

    def __init__(self, section: HarnessConfig) -> None:
        self._harness = Harness(section)

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        with temporary_directory() as directory:
            places = Places(Path(directory) / "home", Path(directory) / "work")
            temporary = Path(directory) / "tmp"
            for made in (places.home, places.workdir, temporary):
                made.mkdir()
            launch = self._harness.prepare(prompt, base_url, api_key, places)
            environment = {**inherit(INHERITED_VARIABLES), "TMPDIR": str(temporary), **launch.environment}
            await run_program(launch.argv, environment, cwd=places.workdir, keeps_output=True)
        return AgentResult()


def inherit(names: Iterable[str]) -> dict[str, str]:
    """Return those of these environment variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


async def run_program(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    written: bytes | None = None,
    pass_fds: Sequence[int] = (),
    cwd: Path | None = None,
    keeps_output: bool = False,
) -> None:
    """Run a program and kill all that it started at its end; raises CommandError if it fails.

    `written` goes to its standard input, which else is empty. `keeps_output`: the error also has its standard output,
    which is where harnesses tell why they ended.
    """
    run_id = secrets.token_hex(16)
    # A file, not a pipe: a child that outlives its program cannot hold its end open, and it is never full.
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL if written is None else subprocess.PIPE,
            stdout=stderr if keeps_output else subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=pass_fds,
            env={**trace_environment(), **environment, RUN_VARIABLE: run_id},
            cwd=cwd,
            start_new_session=True,
        )
        feeding = asyncio.ensure_future(_feed(process.stdin, written))
        try:
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _kill_run(run_id)
            await cancel_all((feeding,))
            if process.stdin is not None and not process.stdin.is_closing():  # a child may hold the other end
                process.stdin.transport.abort()
            await process.wait()
        if status:
            reported = _read_tail(stderr).strip()
            last_line = reported.splitlines()[-1] if reported else "nothing on standard error"
            raise CommandError(f"exit status {status}: {last_line}\n{reported}")


def _kill_run(run_id: str) -> None:
    """Kill the processes of a run, those in sessions of their own included."""
    for _ in range(MAX_KILLS):
        pids = find_processes(RUN_VARIABLE, run_id)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return


class _Reports:
    """The trainer's end of a program's reports: a socket that keeps writes apart, read as they arrive.

    Records without the key are discarded, so that nothing else can fill the socket, or break a report in two.
    """

    def __init__(self, key: str, receiver: socket.socket, sender: socket.socket) -> None:
        self.sender = sender.fileno()
        self._key = key
        self._receiver = receiver
        self._last: bytes | None = None

    def receive(self) -> bool:
        """Read one record; return False if none is queued."""
        try:
            record = self._receiver.recv(MAX_REPORT_BYTES)
        except OSError:  # nothing is queued
            return False
        if self._key.encode() in record:
            self._last = record
        return True

    def read_last(self) -> bytes | None:
        """Return the last report, once the program has exited; None if it wrote none."""
        for _ in range(MAX_QUEUED_REPORTS):
            if not self.receive():
                break
        return self._last


@contextlib.contextmanager
def _open_reports(key: str) -> Iterator[_Reports]:
    """Receive reports inside the block. This program's copy of the sender stays open, so that no end of file comes."""
    loop = asyncio.get_running_loop()
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with receiver, sender:
        receiver.setblocking(False)
        reports = _Reports(key, receiver, sender)
        loop.add_reader(receiver, reports.receive)
        try:
            yield reports
        finally:
            loop.remove_reader(receiver)


async def _feed(stdin: asyncio.StreamWriter | None, text: bytes | None) -> None:
    """Write the prompt and end standard input; a program may leave it unread."""
    if stdin is None or text is None:
        return
    stdin.transport.set_write_buffer_limits(0)  # `drain` waits until all of it is written
    with contextlib.suppress(ConnectionError):
        stdin.write(text)
        await stdin.drain()
        stdin.close()


def prompt_to_dict(prompt: Prompt, env_state_fields: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a prompt as the JSON object that a program reads, with these fields of its state; None: all."""
    state = dict(prompt.env_state)
    if env_state_fields is not None:
        state = {name: state[name] for name in env_state_fields if name in state}
    return {
        "prompt_id": prompt.prompt_id,
        "messages": [to_openai_message(message) for message in prompt.messages],
        "env_state": state,
        "tools": [dict(tool) for tool in prompt.tools],
    }


def parse_report(name: str, record: bytes | None) -> AgentResult:
    """Return a report as a result, `{name: reward}` for a single reward; rewards are checked later."""
    if record is None:
        return AgentResult()
    try:
        report = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"its report is not JSON in a single write: {error}") from error
    if not isinstance(report, dict):
        raise CommandError("its report is not a JSON object")
    rewards = {name: report["reward"]} if "reward" in report else report.get("rewards", {})
    answer = report.get("answer")
    return AgentResult(rewards, None if answer is None else str(answer), call_rewards=report.get("call_rewards", {}))


def _read_tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - STDERR_TAIL_BYTES))
    return file.read().decode(errors="replace")
