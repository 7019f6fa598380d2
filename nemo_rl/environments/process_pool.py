"""A pool of processes for a function that may hang, crash or exhaust memory without harming the run.

Workers are fresh interpreters (no fork of a process with threads, no second import of the main script) that call one
function, named by its path. Nothing that a worker sends is executed: its replies are JSON (pool_worker.py). With
`sandboxed` it also holds no right and no secret of the trainer's (sandbox.py), for code that a model's text may reach.
"""

import asyncio
import contextlib
import json
import math
import os
import pickle
import queue
import resource
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nemo_rl.environments.pool_worker import START_TIMEOUT_S
from nemo_rl.environments.sandbox import launcher_settings, minimal_environment, temporary_directory
from nemo_rl.errors import WorkerDied, WorkerError, WorkerTimeout

MEMORY_BYTES = 4 * 1024**3  # address space per worker, so that a power tower exhausts no more than its worker
EXIT_GRACE_S = 5.0  # time from the end of a worker's pipe to its own
BATCH_S = 0.02  # a caller waits for the calls of its request
MAX_REPLY_BYTES = 64 * 1024**2
BOOTSTRAP = (
    "import json, sys; settings = json.loads(sys.argv[2]); sys.path[:] = settings['path'];"
    "from nemo_rl.environments.pool_worker import serve; serve(int(sys.argv[1]), settings)"
)
# What ends a process from inside: too much computing, and crashes. Any other signal came from outside.
OWN_SIGNALS = {
    signal.SIGPROF: "verifier_timeout",
    signal.SIGXCPU: "verifier_timeout",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT), "verifier_crash"),
}


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Limits of each worker of a pool."""

    timeout_s: float  # wall time of a request
    cpu_s: float | None = None  # computing time of a call; None: no limit of its own
    memory_bytes: int | None = MEMORY_BYTES  # address space; None: no limit
    sandboxed: bool = False
    max_batch_size: int = 1  # calls of one request; more than 1 only for a function that may be called again


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    args: bytes  # a pickle
    result: asyncio.Future[Any]


class ProcessPool:
    """Processes that run one function, "package.module:name": `await pool.call(*args)`.

    One thread per process takes the calls that wait, several to a request if `max_batch_size` allows it, since a
    request costs 150 us of waking and waiting. A batch takes about BATCH_S, by the pace of the one before.
    """

    def __init__(
        self, function: str, num_workers: int, options: PoolOptions, *, factory_args: tuple[Any, ...] | None = None
    ) -> None:
        """Start the processes.

        With `factory_args` the path names a factory, which makes the function from them in each process. That belongs
        to the start: `timeout_s` does not bound it, and the sandbox closes after it.
        """
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = [_Worker(function, options, factory_args) for _ in range(num_workers)]
        for worker in self._workers:
            shares = (worker, self._calls, num_workers)  # and not the pool, which is closed when it is dropped
            threading.Thread(target=_serve, args=shares, name="process-pool", daemon=True).start()
        self._close = weakref.finalize(self, _close, self._workers, self._calls)

    async def call(self, *args: Any) -> Any:
        """Return the function's result, as JSON holds it: lists for tuples, texts for keys.

        Raises WorkerError for an exception, WorkerTimeout after the wall time, and WorkerDied for a process that ended;
        a process that ended or was late is replaced.
        """
        if not self._close.alive:
            raise WorkerDied("its pool is closed")
        call = _Call(pickle.dumps(args), asyncio.get_running_loop().create_future())
        self._calls.put(call)
        return await call.result

    async def call_verifier(self, *args: Any) -> tuple[Any, str | None]:
        """Return the result and None, or None and what the response did to the process that scored it.

        Raises WorkerError if infrastructure failed, or the row.
        """
        try:
            return await self.call(*args), None
        except WorkerError as error:
            if (fault := find_response_fault(error)) is None:
                raise
            return None, fault

    async def close(self) -> None:
        """Kill the workers, busy ones included; calls that wait raise WorkerDied."""
        self._close()


def _close(workers: "list[_Worker]", calls: "queue.SimpleQueue[_Call | None]") -> None:
    for worker in workers:
        worker.close()
        calls.put(None)


def _serve(worker: "_Worker", calls: "queue.SimpleQueue[_Call | None]", num_workers: int) -> None:
    """Make calls until None comes."""
    pace_s = math.inf
    while (call := calls.get()) is not None:
        others = min(worker.max_batch_size - 1, calls.qsize() // num_workers, int(BATCH_S / pace_s))
        batch = [call, *_take(calls, others)]
        batch = [call for call in batch if not call.result.done()]  # cancelled ones are done
        begin = time.perf_counter()
        try:
            outcomes: Sequence[_Outcome] = worker.call_all([call.args for call in batch])
        except Exception as error:  # raised to the callers: the system starts no process  # noqa: BLE001
            outcomes = [error] * len(batch)
        pace_s = max((time.perf_counter() - begin) / max(len(batch), 1), 1e-6)
        for loop in {call.result.get_loop() for call in batch}:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
                loop.call_soon_threadsafe(_tell_callers, loop, batch, outcomes)
        del call, batch, outcomes  # while the thread waits, what they hold would stay alive


def _take(calls: "queue.SimpleQueue[_Call | None]", number: int) -> Iterator[_Call]:
    """Yield up to `number` of the calls that wait."""
    for _ in range(number):
        try:
            call = calls.get_nowait()
        except queue.Empty:
            return
        if call is None:
            calls.put(None)
            return
        yield call


def _tell_callers(loop: asyncio.AbstractEventLoop, batch: Sequence[_Call], outcomes: "Sequence[_Outcome]") -> None:
    for call, outcome in zip(batch, outcomes, strict=True):
        if call.result.done() or call.result.get_loop() is not loop:
            continue
        if isinstance(outcome, _Returned):
            call.result.set_result(outcome.value)
        else:
            call.result.set_exception(outcome)


def find_response_fault(error: WorkerError) -> str | None:
    """Return the name of what a response did to the process that scored it; None if infrastructure failed.

    Computing time beyond its limit is the response's doing, and so is a crash; a process that was killed from outside,
    or got no computing time, is not.
    """
    if not isinstance(error, WorkerDied) or error.exit_status is None:
        return None
    return OWN_SIGNALS.get(-error.exit_status, "verifier_crash" if error.exit_status >= 0 else None)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


_Outcome: TypeAlias = _Returned | Exception


class _Worker:
    """One process, restarted after each crash or kill."""

    def __init__(self, function: str, options: PoolOptions, factory_args: tuple[Any, ...] | None) -> None:
        self._function = function
        self._options = options
        self._factory_args = factory_args
        self._closed = False
        self._start()

    @property
    def max_batch_size(self) -> int:
        return self._options.max_batch_size

    def call_all(self, batch: Sequence[bytes]) -> list[_Outcome]:
        """Return the result of each call; a batch that its process does not answer is called again, one by one."""
        try:
            return self._request(batch)
        except WorkerError as error:
            if len(batch) == 1:
                return [error]
        return [outcome for args in batch for outcome in self.call_all([args])]

    def close(self) -> None:
        """Kill the process; what it computes is not awaited, and a further call raises WorkerDied."""
        self._closed = True
        self._stop()

    def _request(self, batch: Sequence[bytes]) -> list[_Outcome]:
        if not batch:
            return []
        if self._closed:
            raise WorkerDied(f"{self._function}: its pool is closed")
        if self._process.poll() is not None:
            self._restart()
        if not self._ready:
            (started,) = self._receive(START_TIMEOUT_S, "did not start", "", 1)
            if isinstance(started, Exception):
                self._restart()
                raise started
            self._ready = True
        request_id = secrets.token_hex(8)  # no reply can be written before its request
        self._send((request_id, batch))
        return self._receive(self._options.timeout_s, "did not finish", request_id, len(batch))

    def _send(self, request: tuple[Any, ...] | None) -> None:
        data = pickle.dumps(request)
        self._socket.settimeout(self._options.timeout_s)
        try:
            self._socket.sendall(struct.pack("=Q", len(data)) + data)
        except OSError:  # its death is noticed when the answer is awaited
            return

    def _receive(self, timeout_s: float, problem: str, request_id: str, size: int) -> list[_Outcome]:
        """Return the outcomes of the next reply; a worker that gives none is replaced."""
        try:
            return _read_outcomes(self._read_line(time.monotonic() + timeout_s), request_id, size)
        except TimeoutError as error:
            self._restart()
            raise WorkerTimeout(f"{self._function}: {problem} in {timeout_s:g} s") from error
        except (EOFError, OSError) as error:
            status = self._wait()
            self._restart()
            raise WorkerDied(f"{self._function}: its process died ({_describe(status)})", exit_status=status) from error
        except (ValueError, RecursionError) as error:  # no JSON, or JSON too deep
            self._restart()
            raise WorkerError(f"{self._function}: its process broke the protocol: {error}") from error

    def _read_line(self, deadline_s: float) -> Any:
        line = bytearray()
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-6))
            if not (chunk := self._socket.recv(1 << 16)):
                raise EOFError
            line += chunk
            if len(line) > MAX_REPLY_BYTES:
                raise ValueError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        return json.loads(line)

    def _wait(self) -> int | None:
        """Return the exit status of a process that has closed its pipe; negative: the signal that ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_GRACE_S)
        return self._process.poll()

    def _restart(self) -> None:
        self._stop()
        if not self._closed:
            self._start()
        if self._closed:  # meanwhile, by another thread
            self._stop()

    def _start(self) -> None:
        stack = contextlib.ExitStack()
        self._socket, remote = socket.socketpair()
        options = self._options
        settings = {
            "function": self._function,
            "path": [path or os.getcwd() for path in sys.path],
            "timeout_s": options.timeout_s,
            "cpu_s": options.cpu_s,
            "memory_bytes": options.memory_bytes,
            "sandbox": launcher_settings(options.memory_bytes or resource.RLIM_INFINITY) if options.sandboxed else None,
        }
        home = stack.enter_context(temporary_directory()) if options.sandboxed else None
        with remote:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *(["-I"] if home else []),
                    "-c",
                    BOOTSTRAP,
                    str(remote.fileno()),
                    json.dumps(settings),
                ],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if home else None,  # a model's text would reach the terminal
                stderr=subprocess.DEVNULL if home else None,
                cwd=home,
                env=minimal_environment(home) if home else None,
                start_new_session=True,
            )
        self._stop = weakref.finalize(self, _end, self._process, self._socket, stack)
        self._ready = False
        self._send(self._factory_args)


def _read_outcomes(reply: Any, request_id: str, size: int) -> list[_Outcome]:
    """Return the outcome of each call in a reply; raises ValueError if it is no reply to this request."""
    results = reply.get("results") if isinstance(reply, dict) and reply.get("id") == request_id else None
    if not isinstance(results, list) or len(results) != size:
        raise ValueError("no reply to this request")
    outcomes: list[_Outcome] = []
    for result in results:
        if not isinstance(result, dict) or not result.keys() & {"result", "error"}:
            raise ValueError("a reply without result and error")
        outcomes.append(WorkerError(str(result["error"])) if "error" in result else _Returned(result["result"]))
    return outcomes


def _end(process: subprocess.Popen[bytes], connection: socket.socket, stack: contextlib.ExitStack) -> None:
    """Kill a worker and remove its directory; also when the pool is dropped, or the interpreter exits."""
    process.kill()
    process.wait()
    connection.close()
    stack.close()


def _describe(exit_status: int | None) -> str:
    if exit_status is not None and exit_status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-exit_status).name
    return f"exit status {exit_status}"
