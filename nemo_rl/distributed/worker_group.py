"""Processes that work together: one class, one rank each, failing as one.

A collective operation waits for every rank, so a rank that fails leaves the others waiting, or failing from its loss.
Here the first failure ends all of them at once, and the error is the cause, not its echo in another rank.
"""

import asyncio
import faulthandler
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.distributed.actors import ActorHandle, put, spawn_actor
from nemo_rl.distributed.cluster import ReservedSlot, node_ip
from nemo_rl.distributed.machine import unused_port
from nemo_rl.errors import WorkerDied, WorkerError

MAX_KEPT_RECORDS = 10_000  # unread records; the oldest are dropped first
PROBE_S = 5.0  # limit for a live worker to answer, even a busy one
PIDS_S = 120.0
MAX_CONCURRENT_CALLS = 8  # a method of the object, the log, the probes
TAIL_LINES = 20


class WorkerGroup:
    """Workers that act as one: `create`, then `call_all`. After a failure every call raises it."""

    def __init__(self, workers: Sequence[ActorHandle], log_files: Sequence[Path | None]) -> None:
        self._workers = list(workers)
        self._log_files = list(log_files)
        self._death: asyncio.Future[WorkerError] = asyncio.get_running_loop().create_future()
        self._failure: WorkerError | None = None  # why calls are refused
        self._watchers = [asyncio.create_task(self._watch(rank)) for rank in range(len(workers))]

    @classmethod
    async def create(
        cls,
        target: Callable[..., Any],
        *args: Any,
        slots: Sequence[ReservedSlot],
        role: str,
        timeout_s: float,
        log_dir: Path | None = None,
        env_vars: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> "WorkerGroup":
        """Make `target(*args, **kwargs, rank=, world_size=, master_address=, master_port=)` in one process per slot.

        The constructor and all methods run on one thread of the process. What a process writes goes to
        `log_dir/<role>_<rank>.log`; rank 0's log records from INFO on, and the others' warnings, come here too.

        Raises:
            WorkerError: a constructor raised, or not all were there within `timeout_s`.
        """
        log_files = [_log_file(log_dir, role, rank) for rank in range(len(slots))]
        workers = [
            spawn_actor(
                Worker,
                log_files[rank],
                logging.WARNING if rank else logging.INFO,
                label=f"{role} rank {rank}",
                slot=slot,
                num_threads=1,
                max_concurrency=MAX_CONCURRENT_CALLS,
                env_vars=_environment(rank, slots) | dict(env_vars or {}),
            )
            for rank, slot in enumerate(slots)
        ]
        group = cls(workers, log_files)
        try:
            async with asyncio.timeout(timeout_s):
                await group._construct(target, args, kwargs, slots)
        except TimeoutError as error:
            group.kill()
            raise WorkerError(
                f"the {len(slots)} {role} ranks were not ready within {timeout_s:g} s (cluster.start_timeout_s)"
            ) from error
        except BaseException:
            group.kill()
            raise
        return group

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    async def call_all(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Return the results of method `name` of every rank, by rank; the arguments are sent once.

        Raises:
            WorkerError: a rank raised, died, or did not answer in time: the one that was the cause, with its
                traceback. All processes have been ended then.
        """
        return await self._call(self._workers, name, args, kwargs, timeout_s)

    async def call_rank0(self, name: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Return the result of rank 0 alone, for a method that is no collective operation."""
        return (await self._call(self._workers[:1], name, args, kwargs, timeout_s))[0]

    async def pids(self) -> list[int]:
        """Return the process ids on their machines."""
        return await self._call(self._workers, "pid", (), {}, PIDS_S)

    @asynccontextmanager
    async def cancel_task_on_worker_death(self) -> AsyncIterator[None]:
        """Cancel the current task when a worker dies inside the block, and raise the WorkerError at its end."""
        task = asyncio.current_task()
        assert task is not None

        def on_death(death: "asyncio.Future[WorkerError]") -> None:
            if not death.cancelled():
                task.cancel()

        self._death.add_done_callback(on_death)
        try:
            yield
        except asyncio.CancelledError:
            if not self._death.done() or self._death.cancelled():
                raise
            task.uncancel()
            raise self._death.result() from None
        finally:
            self._death.remove_done_callback(on_death)

    def kill(self) -> None:
        """End all processes at once; may be called again."""
        self._failure = self._failure or WorkerError("the workers were ended")
        self._death.cancel()
        for watcher in self._watchers:
            watcher.cancel()
        for worker in self._workers:
            worker.kill()

    async def _construct(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], slots: Sequence[ReservedSlot]
    ) -> None:
        address, port = await self.call_rank0("endpoint")
        if len({slot.node_id for slot in slots}) == 1:
            address = "127.0.0.1"
        shared = {**kwargs, "world_size": len(slots), "master_address": address, "master_port": port}
        calls = [
            worker.call("make", target, args, {**shared, "rank": rank}) for rank, worker in enumerate(self._workers)
        ]
        await self._await_all(calls)

    async def _call(
        self,
        workers: Sequence[ActorHandle],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
    ) -> list[Any]:
        if self._failure is not None:
            raise WorkerError(f"{name} was asked of workers that are gone: {self._failure}") from self._failure
        payload = put(args, kwargs) if len(workers) > 1 else (args, kwargs)
        return await self._await_all(
            [worker.call_with_payload(name, payload, timeout_s=timeout_s) for worker in workers]
        )

    async def _await_all(self, calls: Sequence[Any]) -> list[Any]:
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = [rank for rank, task in enumerate(tasks) if task.done() and task.exception() is not None]
            if failed:
                raise await self._end_all(failed[0], tasks[failed[0]].exception())
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_all(self, rank: int, error: BaseException | None) -> BaseException:
        """End all workers; return the error to raise: that of a dead rank if there is one."""
        if not isinstance(error, WorkerError):
            return error or WorkerError("unknown")
        if not isinstance(error, WorkerDied):
            rank, error = await self._find_dead_rank(rank, error)
        if self._failure is None:
            self._failure = self._with_log_tail(rank, error)
        self.kill()
        return self._failure

    async def _find_dead_rank(self, rank: int, error: WorkerError) -> tuple[int, WorkerError]:
        """Return the rank that died: others fail from its loss before Ray reports it, so probe all."""
        probes = [worker.call("pid", timeout_s=PROBE_S) for worker in self._workers]
        answers = await asyncio.gather(*probes, return_exceptions=True)
        return next(((r, answer) for r, answer in enumerate(answers) if isinstance(answer, WorkerDied)), (rank, error))

    def _with_log_tail(self, rank: int, error: WorkerError) -> WorkerError:
        """Append the end of a dead worker's log to its error."""
        file = self._log_files[rank]
        if not isinstance(error, WorkerDied) or file is None or not file.exists():
            return error
        lines = file.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        written = "\n".join(["; the last lines of " + str(file) + ":", *lines]) if lines else f"; {file} is empty"
        return WorkerDied(f"{error}{written}")

    async def _watch(self, rank: int) -> None:
        """Forward a worker's log.

        Consumes: the worker's log. Produces: log records here, and the group's end when the worker dies.
        """
        try:
            async for line in self._workers[rank].stream("log_lines"):
                logging.getLogger(line.logger).log(line.level, "[%s] %s", self._workers[rank].name, line.message)
        except WorkerError as error:
            if self._failure is None:
                self._failure = self._with_log_tail(rank, error)
                if not self._death.done():
                    self._death.set_result(self._failure)
                for worker in self._workers:
                    worker.kill()


def _log_file(log_dir: Path | None, role: str, rank: int) -> Path | None:
    """Return the absolute path, since workers run in another directory."""
    if log_dir is None:
        return None
    log_dir.mkdir(parents=True, exist_ok=True)
    return log_dir.absolute() / f"{role}_{rank}.log"


def _environment(rank: int, slots: Sequence[ReservedSlot]) -> dict[str, str]:
    """Share the cores of a node among its ranks; Ray would allow each one thread."""
    ranks_on_node = [slot.node_id for slot in slots].count(slots[rank].node_id)
    return {"OMP_NUM_THREADS": str(max(1, int(slots[rank].node_cpus) // ranks_on_node))}


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log record, as text."""

    level: int
    logger: str
    message: str


class Worker:
    """One worker's process; methods that are not its own are those of the object that `make` created."""

    def __init__(self, log_file: Path | None, level: int) -> None:
        if log_file is not None and log_file.parent.is_dir():  # may not exist on another machine
            _redirect_output(log_file)
        self._target: Any = None
        self._records = _LogCapture(level)
        root = logging.getLogger()
        root.handlers = [_stderr_handler(), self._records]
        root.setLevel(logging.WARNING)
        logging.getLogger("nemo_rl").setLevel(logging.INFO)
        logging.captureWarnings(True)

    def endpoint(self) -> tuple[str, int]:
        """Return an address of this machine and a port that was free a moment ago."""
        return node_ip(), unused_port("")

    def make(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._target = target(*args, **kwargs)

    async def pid(self) -> int:
        """Return the process id, also while a method of the object runs."""
        return os.getpid()

    async def log_lines(self) -> AsyncIterator[LogLine]:
        """Yield log lines as they come; never ends."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        self._records.on_record = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            while self._records.lines:
                yield self._records.lines.popleft()
            ready.clear()
            if not self._records.lines:
                await ready.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


class _LogCapture(logging.Handler):
    """Keeps records as text until they are read."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: deque[LogLine] = deque(maxlen=MAX_KEPT_RECORDS)
        self.on_record: Callable[[], object] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(LogLine(record.levelno, record.name, self.format(record)))
        self.on_record()


def _redirect_output(log_file: Path) -> None:
    """Redirect all output of this process, C libraries included, and its stack at a fatal signal to `log_file`."""
    file = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)


def _stderr_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    return handler
