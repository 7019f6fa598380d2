"""The ranks of a model: their positions, process group and device mesh.

Ranks form a mesh of (pipeline x data x context x tensor parallel). Tensor-parallel ranks share every layer,
context-parallel ranks the tokens of each micro-batch, data-parallel ranks the samples, and the pipeline stages, of
Megatron only, the layers. With FSDP2 data and context ranks together are the shards: each has a part of the weights.
Besides the collectives of FSDP2, DTensor and Megatron, a few numbers are exchanged on the CPU.
"""

import atexit
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_rl.config.policy import ParallelModelConfig
from nemo_rl.distributed.machine import listen_on
from nemo_rl.errors import PolicyError

ValueT = TypeVar("ValueT")

CHECKPOINT_TIMEOUT_S = 1800.0  # a slow network disk and a large model


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The position of one rank, and how it finds the others."""

    # ((stage * data_parallel_size + data rank) * context_parallel_size + context rank) * tensor_parallel_size + ...
    rank: int = 0
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1  # neighbours that divide a layer's experts; with FSDP2 of the shards
    context_parallel_size: int = 1
    divides_only_long: bool = False  # ranks of a context share long samples, and have packs of the others of their own
    init_method: str | None = None  # "tcp://host:port" of rank 0, or "file:///path"; None: a single rank
    timeout_s: float = 600.0  # deadline of joining and of each collective

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")
        if self.world_size > 1 and self.init_method is None:
            raise ValueError(f"{self.world_size} ranks need an init_method to find each other")
        if self.num_shards * self.tensor_parallel_size % self.expert_parallel_size:
            raise ValueError(f"{self.expert_parallel_size} expert parallel ranks of {self.world_size}")

    @classmethod
    def for_worker(cls, model: ParallelModelConfig, *, rank: int, world_size: int, address: str) -> "RankLayout":
        """Return the layout of one of `world_size` processes; `address` is that of rank 0, host:port."""
        data = world_size // model.model_parallel_size
        experts = model.parallelism.experts_on(data, key=model.backend_key)
        return cls(
            rank=rank,
            data_parallel_size=data,
            tensor_parallel_size=model.tensor_parallel_size,
            pipeline_parallel_size=model.pipeline_parallel_size,
            expert_parallel_size=experts.parallel,
            context_parallel_size=model.context_parallel_size,
            divides_only_long=model.parallelism.divides_only_long,
            init_method=f"tcp://{address}" if world_size > 1 else None,
        )

    @property
    def world_size(self) -> int:
        return self.num_shards * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_shards(self) -> int:
        """Return the number of ranks of a stage with different tokens: over them gradients are summed."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def undivided(self) -> "RankLayout":
        """Return the layout in which the ranks of a context each have samples of their own."""
        return replace(self, data_parallel_size=self.num_shards, context_parallel_size=1)

    @property
    def data_parallel_rank(self) -> int:
        return self.rank // self._ranks_per_sample % self.data_parallel_size

    @property
    def context_parallel_rank(self) -> int:
        return self.rank // self.tensor_parallel_size % self.context_parallel_size

    @property
    def is_dp_leader(self) -> bool:
        """Return whether this rank stands for the ranks of the last stage with the same samples, so that a sum over all
        ranks counts them once."""
        return self.rank % self._ranks_per_sample == 0 and self.rank >= self._last_stage_first_rank

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of a tensor on the CPU, in place; the same on every rank."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def all_gather_data_parallel(self, value: ValueT) -> list[ValueT]:
        """Return the value of each data-parallel rank of the last stage, in order; the same on every rank."""
        return self.all_gather_object(value)[self._last_stage_first_rank :: self._ranks_per_sample]

    @property
    def returns_rows(self) -> bool:
        """Return whether this rank returns scores of rows; others have the same ones, or none."""
        return (self.undivided if self.divides_only_long else self).is_dp_leader

    def all_gather_shards(self, value: ValueT) -> list[ValueT]:
        """Return the value of each shard of the last stage, in order; the same on every rank."""
        return self.all_gather_object(value)[self._last_stage_first_rank :: self.tensor_parallel_size]

    def all_gather_object(self, value: ValueT) -> list[ValueT]:
        """Return each rank's value, in order; the same on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[ValueT | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return cast(list[ValueT], values)

    @property
    def _ranks_per_sample(self) -> int:
        """Return the number of neighbours of a stage that compute the same samples."""
        return self.context_parallel_size * self.tensor_parallel_size

    @property
    def _last_stage_first_rank(self) -> int:
        return (self.pipeline_parallel_size - 1) * self.num_shards * self.tensor_parallel_size


SINGLE_RANK = RankLayout()


def join(layout: RankLayout, device: torch.device) -> None:
    """Join the process group of all ranks, once per process; a single rank needs no port.

    Raises:
        PolicyError: the process is in another group, or the other ranks did not join before the deadline.
    """
    if dist.is_initialized():
        position = (dist.get_rank(), dist.get_world_size())
        if position != (layout.rank, layout.world_size):
            raise PolicyError(
                f"rank {layout.rank} of {layout.world_size}: the process is rank {position[0]} of {position[1]}"
            )
        return
    try:
        store = _make_store(layout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=None if store is not None else layout.init_method,
            store=store,
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timedelta(seconds=layout.timeout_s),
        )
    except (RuntimeError, OSError) as error:  # torch.distributed's own, or that of a file store without an answer
        raise PolicyError(
            f"rank {layout.rank} of {layout.world_size} cannot join {layout.init_method}: {error}"
        ) from error
    atexit.register(_destroy_process_group)


def _make_store(layout: RankLayout) -> dist.Store | None:
    """Return the store by which ranks meet; at tcp://host:port rank 0 listens there alone. None: made by torch."""
    if layout.world_size == 1:
        return dist.HashStore()
    url = urlsplit(layout.init_method or "")
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        return None
    listener = listen_on(url.hostname, url.port)[0] if layout.rank == 0 else None
    timeout = timedelta(seconds=layout.timeout_s)
    return dist.TCPStore(
        url.hostname, url.port, layout.world_size, layout.rank == 0, timeout, master_listen_fd=listener
    )


def device_mesh(layout: RankLayout, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks with the dimensions "shards" and "tp"; all ranks call it in the same order.

    With expert parallelism it also has "ep", the ranks that together hold the experts, and "edp", those that hold the
    same ones; "shards" is both together.
    """
    return _mesh(device.type, layout.num_shards, layout.tensor_parallel_size, layout.expert_parallel_size)


def context_group(layout: RankLayout) -> dist.ProcessGroup:
    """Return the group of the ranks that share this rank's micro-batches; all ranks call it in the same order."""
    return _strided_group(layout.world_size, layout.context_parallel_size, layout.tensor_parallel_size)


@lru_cache
def checkpoint_group() -> dist.ProcessGroup:
    """Return another group of all ranks, on the CPU: a background save uses it while training uses the others."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=CHECKPOINT_TIMEOUT_S)))


@lru_cache
def _mesh(device_type: str, shards: int, tensor: int, expert: int) -> DeviceMesh:
    if expert == 1:
        return init_device_mesh(device_type, (shards, tensor), mesh_dim_names=("shards", "tp"))
    mesh = init_device_mesh(device_type, (shards // expert, expert, tensor), mesh_dim_names=("edp", "ep", "tp"))
    mesh["edp", "ep"]._flatten("shards")
    return mesh


@lru_cache
def _strided_group(num_ranks: int, size: int, stride: int) -> dist.ProcessGroup:
    """Return this rank's group of `size` ranks that are `stride` apart."""
    ranks = torch.arange(num_ranks, device="cpu").view(-1, size, stride).transpose(1, 2).reshape(-1, size)
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return cast(dist.ProcessGroup, own)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
