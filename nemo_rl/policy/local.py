"""The policy and teachers in this process, each a single rank on a thread of its own.

On several ranks, or with a backend that needs a process of its own, `worker_group.py` takes their place.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.interfaces import LossFn, TopK
from nemo_rl.policy.backends import make_policy_worker, make_teacher_worker
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.policy.worker import PolicyWorker, ScoringWorker, TeacherWorker
from nemo_rl.types import TrainingBatch

ResultT = TypeVar("ResultT")
WorkerT = TypeVar("WorkerT", bound=ScoringWorker)


class _LocalWorker(Generic[WorkerT]):
    """A worker whose calls run on a thread of its own and leave the event loop free."""

    def __init__(self, thread_name: str, make_worker: Callable[[], WorkerT]) -> None:
        self._thread = PolicyThread(thread_name)
        try:
            self._worker = self._thread.run_blocking(make_worker)
        except BaseException:
            self._thread.close()
            raise

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._worker.logprobs, batch)

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        return await self._thread.run(self._worker.topk_logprobs, batch, k)

    async def offload(self) -> None:
        await self._thread.run(self._worker.offload)

    async def onload(self) -> None:
        await self._thread.run(self._worker.onload)

    async def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._thread.close()


class LocalPolicy(_LocalWorker[PolicyWorker]):
    """A `PolicyWorker` in this process; satisfies `interfaces.Policy`.

    The arguments are those of `PolicyWorker`; without a layout it is a single rank.
    """

    def __init__(self, config: PolicyConfig, *, layout: RankLayout = SINGLE_RANK, **arguments: Any) -> None:
        super().__init__("policy", partial(make_policy_worker, config, layout=layout, **arguments))

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._worker.reference_logprobs, batch)

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        return await self._thread.run(self._worker.train_step, batch, loss_fn)

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        """Call `use` on the policy's thread."""
        return cast(ResultT, await self._thread.run(self._worker.run_with_weights, use))

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        await self._thread.run(partial(self._worker.save, Path(path), save_optimizer=save_optimizer))

    async def finish_save(self) -> None:
        await self._thread.run(self._worker.finish_save)

    async def load(self, path: Path) -> None:
        await self._thread.run(self._worker.load, Path(path))

    async def close(self) -> None:
        """Wait for the running call and the running save, and end the thread."""
        try:
            await self._thread.run(self._worker.close)
        finally:
            self._thread.close()


class LocalTeacher(_LocalWorker[TeacherWorker]):
    """A `TeacherWorker` in this process; satisfies `interfaces.Teacher`. The arguments are those of `TeacherWorker`."""

    def __init__(self, config: TeacherConfig, *, layout: RankLayout = SINGLE_RANK, **arguments: Any) -> None:
        super().__init__("teacher", partial(make_teacher_worker, config, layout=layout, **arguments))


class PolicyThread:
    """A single thread that runs calls one after another.

    Grad mode and CUDA streams are thread-local, and torch may give a new thread another number of intra-op threads than
    its creator has. So all calls of one model run on the same thread, with the creator's number.
    """

    def __init__(self, name: str = "policy") -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=name,
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return the function's result; the event loop continues meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def run_blocking(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """Return the function's result and block until then; for construction, before an event loop has work."""
        return self._executor.submit(function, *args).result()

    def close(self) -> None:
        """Wait for the running call and join the thread; later calls raise RuntimeError."""
        self._executor.shutdown(wait=True)
