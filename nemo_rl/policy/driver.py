"""The policy and teachers as the driver calls them: a thread of this process, or one process per rank.

Every call runs on all ranks and returns rank 0's result; scores are merged from the ranks' rows. Arguments to ranks in
processes of their own are pickled: batches, losses and the callables of `run_with_weights`. If one rank fails, the
whole group ends with WorkerError, which carries that rank's traceback.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.distributed.machine import compute_in_turn, release_openmp_threads
from nemo_rl.errors import WorkerError, WorkerTimeout
from nemo_rl.interfaces import LossFn, OffloadPart
from nemo_rl.loss_types import TopK
from nemo_rl.policy.batch_transfer import SentBatch, merge_recorded, merge_rows
from nemo_rl.policy.micro_batches import columns_of
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.policy.worker import make_policy_worker, make_teacher_worker
from nemo_rl.token_columns import ROUTED_EXPERTS
from nemo_rl.types import TrainingBatch

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import ReservedSlot
    from nemo_rl.distributed.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

CLOSE_TIMEOUT_S = 30.0


class ScoringCalls(ABC):
    """The methods of `interfaces.Teacher` as calls of workers, which policies share."""

    @abstractmethod
    async def _call_all(self, name: str, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """Return the results of a worker's method by rank; raises WorkerTimeout for one that is late."""

    def _to_send(self, batch: TrainingBatch) -> Any:
        """Return the form in which workers receive a batch."""
        return batch

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return (await self._score("logprobs", batch))[0]

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        ids, logprobs = await self._score("topk_logprobs", batch, k)
        return TopK(ids, logprobs)

    async def offload(self, *parts: OffloadPart) -> None:
        await self._call("offload", *parts)

    async def onload(self, *parts: OffloadPart) -> None:
        await self._call("onload", *parts)

    async def _score(self, name: str, batch: TrainingBatch, *args: Any) -> list[torch.Tensor]:
        """Return the scores of the whole batch, merged from the ranks' rows."""
        parts = await self._call_all(name, self._to_send(batch), *args)
        return await asyncio.to_thread(compute_in_turn, merge_rows, parts, batch)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return rank 0's result."""
        return (await self._call_all(name, *args, **kwargs))[0]


class PolicyCalls(ScoringCalls):
    """The methods of `interfaces.Policy` as calls of workers."""

    async def select(self, name: str) -> None:
        await self._call("select", name)

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        logprobs, *routes = await self._score("logprobs", batch)
        if routes:
            own = _without_padding(routes[0], batch[keys.LENGTHS])
            columns = {**(columns_of(batch) or {}), ROUTED_EXPERTS: own}
            batch[keys.COLUMNS] = TensorDict(columns, batch_size=batch.batch_size)
        return logprobs

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return (await self._score("reference_logprobs", batch))[0]

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        return await self._call("train_step", self._to_send(batch), loss_fn)

    async def recorded_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return merge_recorded(await self._call_all("recorded_logprobs"), batch)

    async def run_with_weights(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> ResultT:
        """Call `use` in rank 0's process, on its thread, while the other ranks help to gather the weights."""
        return await self._call("run_with_weights", use, adapter_only=adapter_only)

    async def run_on_all_ranks(
        self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT], *, adapter_only: bool = False
    ) -> Sequence[ResultT]:
        return await self._call_all("run_on_rank", use, adapter_only=adapter_only)

    async def start_profile(self, directory: Path, name: str) -> None:
        """Begin a profile on each rank, `<name>_policy_rank<rank>.json.gz`; every rank must reach the directory."""
        await self._call("start_profile", _absolute(directory), name)

    async def stop_profile(self) -> None:
        await self._call("stop_profile")

    async def empty_cache(self) -> None:
        await self._call("empty_cache")

    async def device_bytes(self) -> int:
        return await self._call("device_bytes")

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Begin to save into a directory that every rank can reach."""
        await self._call("save", _absolute(path), save_optimizer=save_optimizer)

    async def has_written_save(self) -> bool:
        return all(await self._call_all("has_written_save"))

    async def finish_save(self) -> None:
        await self._call("finish_save")

    async def load(self, path: Path) -> None:
        await self._call("load", _absolute(path))


def _without_padding(routes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return routes [B, T, L, k] that are missing after each row's tokens."""
    is_padding = torch.arange(routes.shape[1]) >= lengths[:, None]
    routes.numpy()[is_padding.numpy()] = torch.iinfo(routes.dtype).max
    return routes


def _absolute(path: Path) -> Path:
    """Return the absolute path: workers have another working directory."""
    return Path(path).absolute()


class _OnThread(ScoringCalls):
    """A worker whose calls run on a thread of its own and leave the event loop free.

    A call that takes longer than `<key>.call_timeout_s` raises WorkerTimeout; its thread cannot be stopped and is
    abandoned.
    """

    def __init__(self, key: str, call_timeout_s: float, make_worker: Callable[[], Any]) -> None:
        self._key = key
        self._call_timeout_s = call_timeout_s
        self._thread = PolicyThread(key.partition(".")[0])
        try:
            self._worker = self._thread.run_blocking(make_worker)
        except BaseException:
            self._thread.close()
            raise

    async def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._thread.close()

    async def _call_all(self, name: str, *args: Any, **kwargs: Any) -> Sequence[Any]:
        call = partial(getattr(self._worker, name), *args, **kwargs)
        try:
            return [await self._thread.run(call, timeout_s=self._call_timeout_s)]
        except ThreadHung as error:
            problem = f"{self._key} rank 0.{name} did not end in {self._call_timeout_s} s ({self._key}.call_timeout_s)"
            raise WorkerTimeout(problem) from error


class LocalPolicy(_OnThread, PolicyCalls):
    """A `PolicyWorker` in this process; satisfies `interfaces.Policy`.

    The arguments are those of `PolicyWorker`; without a layout it is a single rank.
    """

    def __init__(self, config: PolicyConfig, *, layout: RankLayout = SINGLE_RANK, **arguments: Any) -> None:
        make_worker = partial(make_policy_worker, config, layout=layout, **arguments)
        super().__init__("policy", config.call_timeout_s, make_worker)

    async def close(self) -> None:
        """Wait for the running call and save, then end the thread; abandon a call past its deadline."""
        try:
            if not self._thread.is_hung:
                await self._call("close")
        finally:
            self._thread.close()


class LocalTeacher(_OnThread):
    """A `TeacherWorker` in this process; satisfies `interfaces.Teacher`. The arguments are those of `TeacherWorker`."""

    def __init__(self, config: TeacherConfig, *, layout: RankLayout = SINGLE_RANK, **arguments: Any) -> None:
        make_worker = partial(make_teacher_worker, config, layout=layout, **arguments)
        super().__init__(arguments["section"], config.call_timeout_s, make_worker)


class ThreadHung(Exception):
    """A call on a thread missed its deadline; the thread is unusable."""


class PolicyThread:
    """A single thread that runs calls one after another.

    Grad mode and CUDA streams are thread-local, and torch may give a new thread another number of intra-op threads than
    its creator has. So all calls of one model run on the same thread, with the creator's number. It is a daemon, so
    that a call that never ends does not keep the process from exiting.
    """

    def __init__(self, name: str = "policy") -> None:
        self.is_hung = False
        self._is_closed = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run_calls, args=(torch.get_num_threads(),), name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., ResultT], *args: Any, timeout_s: float | None = None) -> ResultT:
        """Return the function's result; the event loop continues meanwhile. Raises ThreadHung after `timeout_s`."""
        result = asyncio.wrap_future(self._submit(partial(function, *args)))
        try:
            await asyncio.wait((result,), timeout=timeout_s)
            if not result.done():
                self.is_hung = True
                raise ThreadHung
            return result.result()
        finally:
            result.cancel()  # drops a call that has not begun, if the caller was cancelled or has given up

    def run_blocking(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return the function's result and block until then; for construction, before an event loop has work."""
        return self._submit(partial(function, *args)).result()

    def close(self) -> None:
        """Wait for the running call, unless it hangs, and join the thread; later calls raise RuntimeError."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)
        if not self.is_hung:
            self._thread.join()

    def _submit(self, call: Callable[[], ResultT]) -> "Future[ResultT]":
        if self._is_closed:
            raise RuntimeError(f"the thread {self._thread.name} is closed")
        future: Future[ResultT] = Future()
        release_openmp_threads()  # the caller's
        self._calls.put((future, partial(copy_context().run, call)))  # its spans belong to the caller's
        return future

    def _run_calls(self, num_torch_threads: int) -> None:
        item = self._calls.get()
        torch.set_num_threads(num_torch_threads)  # not earlier: the creator may be setting its own number meanwhile
        while item is not None:
            _run_call(*item)
            del item  # while it waits, the last call's tensors would stay alive
            release_openmp_threads()
            item = self._calls.get()


def _run_call(future: "Future[ResultT]", call: Callable[[], ResultT]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # raised to the caller, who waits for the future  # noqa: BLE001
        future.set_exception(error)
    else:
        future.set_result(result)


class _InProcesses(ScoringCalls):
    """Workers of a group of processes; loads Ray."""

    def __init__(self, workers: "WorkerGroup", *, key: str, call_timeout_s: float) -> None:
        """Wrap running workers, each call of which ends within `<key>.call_timeout_s`; use `create`."""
        self._workers = workers
        self._key = key
        self._call_timeout_s = call_timeout_s

    @classmethod
    async def _start(
        cls, make_worker: Callable[..., Any], config: PolicyConfig | TeacherConfig, *, role: str, **arguments: Any
    ) -> Self:
        from nemo_rl.distributed.worker_group import WorkerGroup  # loads Ray

        make_on_rank = partial(_make_on_rank, make_worker, config)
        workers = await WorkerGroup.create(make_on_rank, role=role, **arguments)
        return cls(workers, key=role, call_timeout_s=config.call_timeout_s)

    @property
    def num_ranks(self) -> int:
        return self._workers.num_workers

    def cancel_task_on_worker_death(self) -> AbstractAsyncContextManager[None]:
        """Return a context that cancels the task inside it when a rank dies, whatever it waits for."""
        return self._workers.cancel_task_on_worker_death()

    async def pids(self) -> list[int]:
        """Return the ranks' process ids on their machines."""
        return await self._workers.pids()

    async def close(self) -> None:
        """End the ranks' processes; may be called twice, and after a failure."""
        self._workers.kill()

    def _to_send(self, batch: TrainingBatch) -> SentBatch:
        return SentBatch(batch)

    async def _call_all(self, name: str, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """Return the results by rank; WorkerTimeout names the first rank that has not answered in time."""
        try:
            return await self._workers.call_all(name, *args, timeout_s=self._call_timeout_s, **kwargs)
        except WorkerTimeout as error:
            raise WorkerTimeout(f"{error} ({self._key}.call_timeout_s)") from error


class PolicyWorkerGroup(_InProcesses, PolicyCalls):
    """The policy on all ranks of a layout; satisfies `interfaces.Policy`."""

    @classmethod
    async def create(
        cls,
        config: PolicyConfig,
        *,
        slots: "Sequence[ReservedSlot]",
        timeout_s: float,
        log_dir: Path | None = None,
        **arguments: Any,
    ) -> Self:
        """Start one worker per slot; `arguments` are those of `PolicyWorker` except its layout.

        Workers write to `log_dir/policy_<rank>.log`. Raises WorkerError when they are not ready within `timeout_s`.
        """
        placed = {"slots": slots, "timeout_s": timeout_s, "log_dir": log_dir}
        return await cls._start(make_policy_worker, config, role="policy", **placed, **arguments)

    async def close(self) -> None:
        """Finish the running save and end the ranks' processes; may be called twice, and after a failure."""
        if self._workers.is_alive:
            try:
                await self._workers.call_all("close", timeout_s=CLOSE_TIMEOUT_S)
            except WorkerError as error:
                logger.warning("policy workers did not close: %s", error)
        self._workers.kill()


class TeacherWorkerGroup(_InProcesses):
    """A teacher on all ranks of a layout; satisfies `interfaces.Teacher`."""

    @classmethod
    async def create(
        cls,
        config: TeacherConfig,
        *,
        section: str,
        slots: "Sequence[ReservedSlot]",
        timeout_s: float,
        log_dir: Path | None = None,
        **arguments: Any,
    ) -> Self:
        """Start one worker per slot; `arguments` are those of `TeacherWorker` except its layout.

        Workers write to `log_dir/<section>_<rank>.log`. Raises WorkerError when they are not ready within `timeout_s`.
        """
        placed = {"slots": slots, "timeout_s": timeout_s, "log_dir": log_dir}
        return await cls._start(make_teacher_worker, config, role=section, section=section, **placed, **arguments)


def _make_on_rank(
    make_worker: Callable[..., Any],
    config: PolicyConfig | TeacherConfig,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    **arguments: Any,
) -> Any:
    address = f"{master_address}:{master_port}"
    layout = RankLayout.for_worker(config, rank=rank, world_size=world_size, address=address)
    return make_worker(config, layout=layout, **arguments)
