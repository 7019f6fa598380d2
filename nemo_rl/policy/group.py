"""`PolicyGroup`: the policy on several ranks, each a process of its own on this machine or another."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.distributed.cluster import ReservedSlot
from nemo_rl.distributed.worker_group import WorkerGroup
from nemo_rl.errors import WorkerError
from nemo_rl.interfaces import LossFn, TopK
from nemo_rl.policy.base_rank import PolicyWorker
from nemo_rl.policy.fsdp2 import FSDP2PolicyWorker
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.teacher import FSDP2TeacherWorker, TeacherWorker
from nemo_rl.types import TrainingBatch

if TYPE_CHECKING:
    from nemo_rl.policy.megatron.rank import MegatronPolicyWorker, MegatronTeacherWorker

logger = logging.getLogger(__name__)


def megatron_policy_worker() -> "type[MegatronPolicyWorker]":
    """The class of a policy's rank; to be called before CUDA is used."""
    with _quiet_import():
        from nemo_rl.policy.megatron.rank import MegatronPolicyWorker
    return MegatronPolicyWorker


def megatron_teacher_worker() -> "type[MegatronTeacherWorker]":
    """The same of a teacher's rank."""
    with _quiet_import():
        from nemo_rl.policy.megatron.rank import MegatronTeacherWorker
    return MegatronTeacherWorker


@contextmanager
def _quiet_import() -> Iterator[None]:
    """It takes seconds, and warns of optional kernels that are not installed.

    With one queue of work on CUDA, what ranks exchange begins before what it overlaps with.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


ResultT = TypeVar("ResultT")

CALL_S = 3600.0  # deadline of one call; a rank that is gone is noticed at once
CLOSE_S = 30.0


class PolicyGroup:
    """Every call is made on all ranks, and rank 0's result is the result; satisfies `interfaces.PolicyConfig`.

    Batches and losses are sent to the ranks, so they are pickled; so is what `run_with_weights` is asked to use. The
    failure of one rank ends all: WorkerError, with that rank's own traceback.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        """Use `create`."""
        self._workers = workers

    @classmethod
    async def create(
        cls,
        config: PolicyConfig,
        *,
        slots: Sequence[ReservedSlot],
        timeout_s: float,
        log_dir: Path | None = None,
        **arguments: Any,
    ) -> "PolicyGroup":
        """A rank on each seat; `arguments` are those of `PolicyWorker` but its layout.

        Ranks write to `log_dir/policy_<rank>.log`. Raises WorkerError when they are not ready within `timeout_s`.
        """
        factory = _PolicyWorkerFactory(config)
        workers = await WorkerGroup.create(
            factory, slots=slots, role="policy", timeout_s=timeout_s, log_dir=log_dir, **arguments
        )
        return cls(workers)

    @property
    def num_ranks(self) -> int:
        return self._workers.num_workers

    def cancel_task_on_worker_death(self) -> AbstractAsyncContextManager[None]:
        """Inside, the death of a rank ends the task that entered, also while it waits for something else."""
        return self._workers.cancel_task_on_worker_death()

    async def pids(self) -> list[int]:
        """The ranks' process ids on their machines."""
        return await self._workers.pids()

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._call("logprobs", batch)

    async def reference_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._call("reference_logprobs", batch)

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        return await self._call("topk_logprobs", batch, k)

    async def train_step(self, batch: TrainingBatch, loss_fn: LossFn) -> dict[str, float]:
        return await self._call("train_step", batch, loss_fn)

    async def run_with_weights(self, use: Callable[[Iterable[tuple[str, torch.Tensor]]], ResultT]) -> ResultT:
        """Call `use` in rank 0's process, while the other ranks help to gather the weights."""
        return await self._call("run_with_weights", use)

    async def save(self, path: Path, *, save_optimizer: bool) -> None:
        """To a folder that every rank reaches."""
        await self._call("save", _absolute(path), save_optimizer=save_optimizer)

    async def finish_save(self) -> None:
        await self._call("finish_save")

    async def load(self, path: Path) -> None:
        await self._call("load", _absolute(path))

    async def offload(self) -> None:
        await self._call("offload")

    async def onload(self) -> None:
        await self._call("onload")

    async def close(self) -> None:
        """End the ranks' processes; may be called twice, and after a failure."""
        if self._workers.is_alive:
            try:
                await self._workers.call_all("close", timeout_s=CLOSE_S)
            except WorkerError as error:
                logger.warning("the policy's ranks did not close: %s", error)
        self._workers.kill()

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return (await self._workers.call_all(name, *args, timeout_s=CALL_S, **kwargs))[0]


def _absolute(path: Path) -> Path:
    """The ranks stand in another directory."""
    return Path(path).absolute()


class _PolicyWorkerFactory:
    """Makes a worker's rank from what a WorkerGroup tells it of its place."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    def __call__(
        self, *, rank: int, world_size: int, master_address: str, master_port: int, **arguments: Any
    ) -> PolicyWorker:
        address = f"{master_address}:{master_port}"
        layout = RankLayout.for_worker(self._config, rank=rank, world_size=world_size, address=address)
        if not self._config.megatron_cfg.enabled:
            return FSDP2PolicyWorker(self._config, layout=layout, **arguments)
        return megatron_policy_worker()(self._config, layout=layout, **arguments)


class TeacherGroup:
    """Every call is made on all ranks, and rank 0's result is the result; satisfies `interfaces.TeacherConfig`.

    The failure of one rank ends all: WorkerError, with that rank's own traceback.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        """Use `create`."""
        self._workers = workers

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
    ) -> "TeacherGroup":
        """A rank on each seat; `arguments` are those of `TeacherWorker` but its layout.

        Ranks write to `log_dir/<section>_<rank>.log`. Raises WorkerError when they are not ready within `timeout_s`.
        """
        workers = await WorkerGroup.create(
            _TeacherWorkerFactory(config),
            slots=slots,
            role=section,
            timeout_s=timeout_s,
            log_dir=log_dir,
            section=section,
            **arguments,
        )
        return cls(workers)

    def cancel_task_on_worker_death(self) -> AbstractAsyncContextManager[None]:
        """Inside, the death of a rank ends the task that entered, also while it waits for something else."""
        return self._workers.cancel_task_on_worker_death()

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

    async def _call(self, name: str, *args: Any) -> Any:
        return (await self._workers.call_all(name, *args, timeout_s=CALL_S))[0]


class _TeacherWorkerFactory:
    """Makes a worker's rank from what a WorkerGroup tells it of its place."""

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config

    def __call__(
        self, *, rank: int, world_size: int, master_address: str, master_port: int, **arguments: Any
    ) -> TeacherWorker:
        address = f"{master_address}:{master_port}"
        layout = RankLayout.for_worker(self._config, rank=rank, world_size=world_size, address=address)
        teacher = megatron_teacher_worker() if self._config.megatron_cfg.enabled else FSDP2TeacherWorker
        return teacher(self._config, layout=layout, **arguments)
