"""A pool of processes for a function that may hang, crash or exhaust memory without harming the run.

Workers are fresh interpreters (no fork of a process with threads, no second import of the main script) that call one
function, named by its path, on pickled arguments sent over a pipe.
"""

import contextlib
import importlib
import multiprocessing
import queue
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.errors import WorkerError

START_TIMEOUT_S = 300.0  # for a worker's imports, beside other work
ORPHAN_GRACE_S = 10.0  # after its deadline, a worker that was not killed is ended by its own alarm
MEMORY_BYTES = 4 * 1024**3  # of address space: a power tower fails in its worker instead of exhausting the machine


class ProcessPool:
    """Processes that run one function, "package.module:name": `await pool.call(*args)`."""

    def __init__(
        self,
        function: str,
        num_workers: int,
        *,
        timeout_s: float,
        memory_bytes: int | None = MEMORY_BYTES,
        setup: tuple[Any, ...] | None = None,
    ) -> None:
        """Start the processes; `memory_bytes` is the address space of each, None for no limit.

        `setup`: arguments of a first call of the function in each process, which belongs to its start: `timeout_s` does
        not bound it, and its result is dropped.
        """
        self._timeout_s = timeout_s
        self._closed = False
        self._idle_workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._idle_workers.put(_Worker(function, timeout_s, memory_bytes, setup))
        self._blocking_calls = BlockingCalls("process-pool", num_workers)

    async def call(self, *args: Any) -> Any:
        """Return the function's result; raises WorkerError for an exception, a crash or a timeout.

        A process that crashed or timed out is replaced.
        """
        return await self._blocking_calls.run(partial(self._call, args))

    async def close(self) -> None:
        """Kill the workers, busy ones included."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle_workers.get_nowait().stop()

    def _call(self, args: tuple[Any, ...]) -> Any:
        worker = self._idle_workers.get()
        try:
            return worker.call(args, self._timeout_s)
        finally:
            if self._closed:
                worker.stop()
            else:
                self._idle_workers.put(worker)


@dataclass(frozen=True, slots=True)
class _WorkerException:
    text: str


class _Worker:
    """One process, restarted after each crash or kill."""

    def __init__(
        self, function: str, timeout_s: float, memory_bytes: int | None, setup: tuple[Any, ...] | None
    ) -> None:
        self._function = function
        self._memory_bytes = memory_bytes
        self._setup = setup
        self._timeout_s = timeout_s
        self._start()

    def call(self, args: tuple[Any, ...], timeout_s: float) -> Any:
        if self._process.poll() is not None:
            self._restart()
        try:
            if not self._ready:
                self._wait_until_ready()
            self._connection.send(args)
            result = self._receive(timeout_s, "did not finish")
        except (EOFError, OSError) as error:
            self._restart()
            raise WorkerError(f"{self._function}: its process died") from error
        if isinstance(result, _WorkerException):
            raise WorkerError(result.text)
        return result

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _wait_until_ready(self) -> None:
        started = self._receive(START_TIMEOUT_S, "did not start")
        if isinstance(started, _WorkerException):
            self._restart()
            raise WorkerError(started.text)
        self._ready = True

    def _receive(self, timeout_s: float, problem: str) -> Any:
        if not self._connection.poll(timeout_s):
            self._restart()
            raise WorkerError(f"{self._function}: {problem} in {timeout_s:g} s")
        return self._connection.recv()

    def _restart(self) -> None:
        self.stop()
        self._start()

    def _start(self) -> None:
        self._connection, remote = multiprocessing.Pipe()
        with remote:
            numbers = [str(remote.fileno()), str(self._timeout_s), str(self._memory_bytes or resource.RLIM_INFINITY)]
            command = [sys.executable, "-m", __name__, self._function, *numbers]
            self._process = subprocess.Popen(
                command, pass_fds=[remote.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        with contextlib.suppress(OSError):  # its death is noticed by the next call
            self._connection.send(self._setup)
        self._ready = False


def serve(function_path: str, descriptor: int, timeout_s: float, memory_bytes: int) -> None:
    """Call the function on each received tuple of arguments until the pipe is closed; runs in the worker.

    The first message is the pool's `setup`; its answer says that the worker is ready.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    module, _, name = function_path.partition(":")
    function = getattr(importlib.import_module(module), name)
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        setup = connection.recv()
        signal.setitimer(signal.ITIMER_REAL, START_TIMEOUT_S + ORPHAN_GRACE_S)
        ready = "ready" if setup is None else _result_of(function, setup)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(ready if isinstance(ready, _WorkerException) else "ready")
        while True:
            args = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
            result = _result_of(function, args)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(result)


def _result_of(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except BaseException as error:  # SystemExit too: only its own call fails
        return _WorkerException(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # Imported under its name: classes of __main__ would differ from the parent's.
    from nemo_rl.environments.process_pool import serve as serve_as_imported

    serve_as_imported(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
