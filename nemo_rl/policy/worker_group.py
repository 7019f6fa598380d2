"""The policy and teachers on several ranks, each worker in a process of its own on this machine or another.

Importing this loads Ray. Every call is made on all ranks, and rank 0's result is the result. Arguments are pickled:
batches, losses and what `run_with_weights` is given. When one rank fails the whole group ends with WorkerError, which
carries that rank's own traceback.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.distributed.cluster import ReservedSlot
from nemo_rl.distributed.worker_group import WorkerGroup
from nemo_rl.errors import WorkerError
from nemo_rl.interfaces import LossFn, TopK
from nemo_rl.policy.backends import make_policy_worker, make_teacher_worker
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.worker import PolicyWorker, TeacherWorker
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

CALL_TIMEOUT_S = 3600.0  # the death of a rank is noticed at once
CLOSE_TIMEOUT_S = 30.0


class _ScoringWorkerGroup:
    """Calls that policies and teachers share."""

    def __init__(self, workers: WorkerGroup) -> None:
        """Wrap running workers; use `create`."""
        self._workers = workers

    @classmethod
    async def _start(
        cls,
        make_worker: Callable[..., Any],
        *,
        slots: Sequence[ReservedSlot],
        role: str,
        timeout_s: float,
        log_dir: Path | None,
        **arguments: Any,
    ) -> Self:
        workers = await WorkerGroup.create(
            make_worker, slots=slots, role=role, timeout_s=timeout_s, log_dir=log_dir, **arguments
        )
        return cls(workers)

    @property
    def num_ranks(self) -> int:
        return self._workers.num_workers

    def cancel_task_on_worker_death(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which the death of a rank cancels the task that entered, whatever it is waiting for."""
        return self._workers.cancel_task_on_worker_death()

    async def pids(self) -> list[int]:
        """Return the ranks' process ids on their machines."""
        return await self._workers.pids()

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._call("logprobs", batch)

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        return await self._call("topk_logprobs", batch, k)

    async def offload(self) -> None:
        await self._call("offload")

    async def onload(self) -> None:
        await self._call("onload")

    async def close(self) -> None:
        """End the ranks' processes; may be called twice, and after a failure."""
        self._workers.kill()

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return (await self._workers.call_all(name, *args, timeout_s=CALL_TIMEOUT_S, **kwargs))[0]


class PolicyWorkerGroup(_ScoringWorkerGroup):
    """The policy on all ranks of a layout; satisfies `interfaces.Policy`."""

    @classmethod
    async def create(
        cls,
        config: PolicyConfig,
        *,
        slots: Sequence[ReservedSlot],
        timeout_s: float,
        log_dir: Path | None = None,
        **arguments: Any,
    ) -> "PolicyWorkerGroup":
        """Start one worker per slot; `arguments` are those of `PolicyWorker` except its layout.

        Workers write to `log_dir/policy_<rank>.log`. Raises WorkerError when they are not ready within `timeout_s`.
        """
        factory = _PolicyWorkerFactory(config)
        return await cls._start(factory, slots=slots, role="policy", timeout_s=timeout_s, log_dir=log_dir, **arguments)

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._call("reference_logprobs", batch)

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        return await self._call("train_step", batch, loss_fn)

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        """Call `use` in rank 0's process while the other ranks help to gather the weights."""
        return await self._call("run_with_weights", use)

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        """Begin to save into a directory that every rank can reach."""
        await self._call("save", _absolute(path), save_optimizer=save_optimizer)

    async def finish_save(self) -> None:
        await self._call("finish_save")

    async def load(self, path: Path) -> None:
        await self._call("load", _absolute(path))

    async def close(self) -> None:
        """Finish the running save and end the ranks' processes; may be called twice, and after a failure."""
        if self._workers.is_alive:
            try:
                await self._workers.call_all("close", timeout_s=CLOSE_TIMEOUT_S)
            except WorkerError as error:
                logger.warning("policy workers did not close: %s", error)
        self._workers.kill()


class TeacherWorkerGroup(_ScoringWorkerGroup):
    """A teacher on all ranks of a layout; satisfies `interfaces.Teacher`."""

    @classmethod
    async def create(
        cls,
        config: TeacherConfig,
        *,
        section: str,
        slots: Sequence[ReservedSlot],
        timeout_s: float,
        log_dir: Path | None = None,
        **arguments: Any,
    ) -> "TeacherWorkerGroup":
        """Start one worker per slot; `arguments` are those of `TeacherWorker` except its layout.

        Workers write to `log_dir/<section>_<rank>.log`. Raises WorkerError when they are not ready within `timeout_s`.
        """
        factory = _TeacherWorkerFactory(config)
        return await cls._start(
            factory, slots=slots, role=section, timeout_s=timeout_s, log_dir=log_dir, section=section, **arguments
        )


def _absolute(path: Path) -> Path:
    """Return the absolute path: workers have another working directory."""
    return Path(path).absolute()


class _PolicyWorkerFactory:
    """Makes the policy worker of one rank; pickled to its process."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    def __call__(
        self, *, rank: int, world_size: int, master_address: str, master_port: int, **arguments: Any
    ) -> PolicyWorker:
        address = f"{master_address}:{master_port}"
        layout = RankLayout.for_worker(self._config, rank=rank, world_size=world_size, address=address)
        return make_policy_worker(self._config, layout=layout, **arguments)


class _TeacherWorkerFactory:
    """Makes the teacher worker of one rank; pickled to its process."""

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config

    def __call__(
        self, *, rank: int, world_size: int, master_address: str, master_port: int, **arguments: Any
    ) -> TeacherWorker:
        address = f"{master_address}:{master_port}"
        layout = RankLayout.for_worker(self._config, rank=rank, world_size=world_size, address=address)
        return make_teacher_worker(self._config, layout=layout, **arguments)
