"""A process that has imported the modules of a command and starts it by fork: a restart costs no imports.

supervisor.py starts it as `python -m nemo_rl.jobs.preload FD` and sends lines of JSON to its standard input:
`{"import": [modules]}`, `{"start": [arguments], "environment": {...}}`. It answers on the descriptor FD: `{"pid": 1}`
for a start, `{"pid": 1, "status": 0}` for its end. Closing its input ends it.
"""

import contextlib
import ctypes
import importlib
import json
import os
import random
import runpy
import select
import signal
import sys
import threading
from typing import Any

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # this process ignores them, a command must not


class Preloader:
    """The loop of that process: serves requests, imports one module at a time between them, reports ends."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._unread = b""
        self._modules: list[str] = []
        self._children: dict[int, int] = {}  # pid by its descriptor

    def serve(self) -> list[str] | None:
        """Serve until the input is closed and return None, or return the arguments in a started child."""
        while True:
            timeout_s = 0 if self._modules else None
            readable, _, _ = select.select([self._requests, *self._children], [], [], timeout_s)
            for descriptor in set(readable) & self._children.keys():
                self._report_end(descriptor)
            if self._requests in readable:
                data = os.read(self._requests, 1 << 20)
                if not data:
                    return None
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    if (arguments := self._handle(json.loads(line))) is not None:
                        return arguments
            elif self._modules:
                self._import_next()

    def _handle(self, request: dict[str, Any]) -> list[str] | None:
        self._modules += request.get("import", ())
        if "start" not in request:
            return None
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # one that comes before `prepare` waits for it
        pid = os.fork() if threading.active_count() == 1 else self._spawn(request)
        if pid == 0:
            self._become_command(request["environment"])
            return request["start"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._children[os.pidfd_open(pid)] = pid
        self._answer({"pid": pid})
        return None

    def _spawn(self, request: dict[str, Any]) -> int:
        """Start the command in a new interpreter: an import has started a thread, which a fork would lose."""
        code = f"from nemo_rl.jobs import preload; preload.prepare(); preload.run({request['start']!r})"
        null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        environment = {**os.environ, **request["environment"]}
        return os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment, file_actions=[null])

    def _become_command(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        for descriptor in (self._answers, *self._children):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        prepare()

    def _import_next(self) -> None:
        with contextlib.suppress(BaseException):  # the command meets the same error itself
            importlib.import_module(self._modules.pop(0))

    def _report_end(self, descriptor: int) -> None:
        pid = self._children.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._answer({"pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _answer(self, answer: dict[str, int]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answers, json.dumps(answer).encode() + b"\n")


def prepare() -> None:
    """Make this process one that a command expects: a session of its own, default signals, fresh random numbers.

    Signals that came since the fork take effect here.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def run(arguments: list[str]) -> None:
    """Run `nemo-rl ARGUMENTS`, or a script with its arguments, as the main program of this process."""
    if arguments[0].endswith(".py"):
        sys.argv = list(arguments)
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.argv = ["nemo-rl", *arguments]
        runpy.run_module("nemo_rl", run_name="__main__", alter_sys=True)


def main() -> None:
    """Serve; in a started command, run it."""
    for number in STOP_SIGNALS:  # sent by the terminal; the supervisor forwards its own
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    answers = int(sys.argv[1])
    os.set_inheritable(answers, False)  # a command that kept it would hide the end of this process
    arguments = Preloader(0, answers).serve()
    if arguments is not None:
        run(arguments)


if __name__ == "__main__":
    main()
