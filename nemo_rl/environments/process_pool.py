"""A pool of processes for a function that may hang, crash or exhaust memory without harming the run.

Workers are fresh interpreters (no fork of a process with threads, no second import of the main script) that call one
function, named by its path, on pickled arguments sent over a pipe.
"""

import contextlib
import importlib
import logging
import multiprocessing
import queue
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from nemo_rl.environments.boundary import BlockingCalls
from nemo_rl.errors import WorkerError

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0  # for a worker's imports
ORPHAN_GRACE_S = 10.0  # after its deadline, a worker that was not killed is ended by its own alarm
MEMORY_BYTES = 4 * 1024**3  # of address space: a power tower fails in its worker instead of exhausting the machine


class ProcessPool:
    """Processes that run one function, "package.module:name": `await pool.call(*args)`."""

    def __init__(self, function: str, num_workers: int, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._closed = False
        self._idle_workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._idle_workers.put(_Worker(function, timeout_s))
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

    def __init__(self, function: str, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._start()

    def call(self, args: tuple[Any, ...], timeout_s: float) -> Any:
        if self._process.poll() is not None:
            self._restart()
        try:
            if not self._ready:
                self._receive(START_TIMEOUT_S, "did not start")
                self._ready = True
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
            command = [sys.executable, "-m", __name__, str(remote.fileno()), self._function, str(self._timeout_s)]
            self._process = subprocess.Popen(
                command, pass_fds=[remote.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._ready = False


def serve(descriptor: int, function_path: str, timeout_s: float) -> None:
    """Call the function on each received tuple of arguments until the pipe is closed; runs in the worker."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    module, _, name = function_path.partition(":")
    function = getattr(importlib.import_module(module), name)
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        connection.send("ready")
        while True:
            args = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
            try:
                result = function(*args)
            except Exception as error:
                result = _WorkerException(f"{type(error).__name__}: {error}")
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(result)


if __name__ == "__main__":
    # Imported under its name: classes of __main__ would differ from the parent's.
    from nemo_rl.environments.process_pool import serve as serve_as_imported

    serve_as_imported(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
