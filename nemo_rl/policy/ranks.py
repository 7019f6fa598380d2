"""Where one rank of the policy stands: its place among the ranks, its process group and meshes, its device.

Ranks lie on a mesh of (pipeline x data x tensor parallel): the ranks of a row share every layer, the rows of a stage
share the samples and its weights, and the stages, of Megatron alone, share the layers. Beside the collectives of FSDP2,
DTensor and Megatron a few numbers are exchanged on the CPU.
"""

import asyncio
import atexit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.config.policy import ParallelModelConfig
from nemo_rl.errors import PolicyError

ResultT = TypeVar("ResultT")


class PolicyThread:
    """Runs calls one after the other on a thread of its own.

    Grad mode and CUDA streams belong to a thread, and torch may give a thread another number of threads than its
    creator has, so everything of one policy happens on the same one, with the creator's number.
    """

    def __init__(self, name: str = "policy") -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=name,
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """The function's result; the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def run_blocking(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """The function's result, waiting for it; for construction, before an event loop has work."""
        return self._executor.submit(function, *args).result()

    def close(self) -> None:
        """Let the running call end and join the thread; calls afterwards raise RuntimeError."""
        self._executor.shutdown(wait=True)


ValueT = TypeVar("ValueT")

CHECKPOINT_TIMEOUT_S = 1800.0  # of a checkpoint: what a slow network disk may take for a large model


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one rank, and how it finds the others."""

    rank: int = 0  # (stage * data_parallel_size + data-parallel rank) * tensor_parallel_size + tensor-parallel rank
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    init_method: str | None = (
        None  # "tcp://host:port" of rank 0, or "file:///path"; None: alone, without FSDP2 if it can be
    )
    timeout_s: float = 600.0  # deadline of joining and of each collective

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if self.world_size > 1 and self.init_method is None:
            raise ValueError(f"{self.world_size} ranks need an init_method to find each other")

    @classmethod
    def for_worker(cls, model: ParallelModelConfig, *, rank: int, world_size: int, address: str) -> "RankLayout":
        """The place of one of `world_size` processes that compute a model; `address` is that of rank 0, host:port."""
        return cls(
            rank=rank,
            data_parallel_size=world_size // model.model_parallel_size,
            tensor_parallel_size=model.tensor_parallel_size,
            pipeline_parallel_size=model.pipeline_parallel_size,
            init_method=f"tcp://{address}" if world_size > 1 else None,
        )

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self.tensor_parallel_size % self.data_parallel_size

    @property
    def is_dp_leader(self) -> bool:
        """One of the ranks that hold the same samples, of the last stage: what is summed over all is counted once."""
        return self.rank % self.tensor_parallel_size == 0 and self.rank >= self._last_stage_first_rank

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a tensor on the CPU, in place; the same on every rank."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather_data_parallel(self, value: ValueT) -> list[ValueT]:
        """Each data-parallel rank's value, of the last stage, in their order; the same on every rank."""
        return self.all_gather_object(value)[self._last_stage_first_rank :: self.tensor_parallel_size]

    def all_gather_object(self, value: ValueT) -> list[ValueT]:
        """Each rank's value, in their order; the same on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[ValueT | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return cast(list[ValueT], values)

    @property
    def _last_stage_first_rank(self) -> int:
        return (self.pipeline_parallel_size - 1) * self.data_parallel_size * self.tensor_parallel_size


SINGLE_RANK = RankLayout()


def join(layout: RankLayout, device: torch.device) -> None:
    """Be in the process group of all ranks; a rank alone needs no port. A process joins once.

    Raises:
        PolicyError: the process is in another group, or the others did not come before the deadline.
    """
    if dist.is_initialized():
        place = (dist.get_rank(), dist.get_world_size())
        if place != (layout.rank, layout.world_size):
            raise PolicyError(
                f"rank {layout.rank} of {layout.world_size}: the process is rank {place[0]} of {place[1]}"
            )
        return
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=layout.init_method if layout.world_size > 1 else None,
            store=dist.HashStore() if layout.world_size == 1 else None,
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=layout.timeout_s),
        )
    except RuntimeError as error:  # torch.distributed's own, or that of a file that nobody answers in
        raise PolicyError(
            f"rank {layout.rank} of {layout.world_size} cannot join {layout.init_method}: {error}"
        ) from error
    atexit.register(_destroy_process_group)


def device_mesh(layout: RankLayout, device: torch.device) -> DeviceMesh:
    """All ranks on the dimensions "dp" and "tp"; to be asked for by all ranks in the same order."""
    return _mesh(device.type, layout.data_parallel_size, layout.tensor_parallel_size)


@lru_cache
def checkpoint_group() -> dist.ProcessGroup:
    """All ranks once more, on the CPU: a save goes on in the background while training uses the other groups."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=CHECKPOINT_TIMEOUT_S)))


@lru_cache
def _mesh(device_type: str, data_parallel_size: int, tensor_parallel_size: int) -> DeviceMesh:
    return init_device_mesh(device_type, (data_parallel_size, tensor_parallel_size), mesh_dim_names=("dp", "tp"))


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
