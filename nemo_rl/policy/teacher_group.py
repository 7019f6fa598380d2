"""`TeacherGroup`: a teacher on several ranks, each a process of its own on this machine or another."""

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import torch

from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.distributed.placement import Seat
from nemo_rl.distributed.worker_group import WorkerGroup
from nemo_rl.interfaces import TopK
from nemo_rl.policy.group import CALL_S
from nemo_rl.policy.megatron.make import megatron_teacher
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.teacher import BaseTeacher, RankTeacher
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)


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
        seats: Sequence[Seat],
        timeout_s: float,
        log_dir: Path | None = None,
        **arguments: Any,
    ) -> "TeacherGroup":
        """A rank on each seat; `arguments` are those of `BaseTeacher` but its layout.

        Ranks write to `log_dir/<section>_<rank>.log`. Raises WorkerError when they are not ready within `timeout_s`.
        """
        workers = await WorkerGroup.create(
            _MakeRank(config),
            seats=seats,
            role=section,
            timeout_s=timeout_s,
            log_dir=log_dir,
            section=section,
            **arguments,
        )
        return cls(workers)

    def ends_this_task(self) -> AbstractAsyncContextManager[None]:
        """Inside, the death of a rank ends the task that entered, also while it waits for something else."""
        return self._workers.ends_this_task()

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


class _MakeRank:
    """Makes a worker's rank from what a WorkerGroup tells it of its place."""

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config

    def __call__(
        self, *, rank: int, world_size: int, master_address: str, master_port: int, **arguments: Any
    ) -> BaseTeacher:
        address = f"{master_address}:{master_port}"
        layout = RankLayout.of_worker(self._config, rank=rank, world_size=world_size, address=address)
        teacher = megatron_teacher() if self._config.megatron_cfg.enabled else RankTeacher
        return teacher(self._config, layout=layout, **arguments)
