"""Megatron's process groups, made from a rank's layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode

from nemo_rl.errors import PolicyError
from nemo_rl.policy.ranks import RankLayout, join


@lru_cache(maxsize=1)
def redirect_cuda_to_cpu() -> None:
    """Make the CPU torch.cuda's current device, and moves to it and synchronization no-ops."""
    module: Any = torch.cuda
    module.current_device = _cpu_device
    module.synchronize = _no_op
    tensor: Any = torch.Tensor
    tensor.cuda = _return_self


class _CudaToCpuMode(TorchFunctionMode):
    """A mode that creates tensors on the CPU when "cuda" is requested."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


@contextmanager
def megatron_device_context(device: torch.device) -> Iterator[None]:
    """Return a context for Megatron's pipeline schedules, which hard-code "cuda"; a no-op on CUDA."""
    if device.type == "cuda":
        yield
        return
    with _CudaToCpuMode():
        yield


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _no_op(*_: Any, **__: Any) -> None:
    return None


def _return_self(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def make_groups(layout: RankLayout, device: torch.device) -> None:
    """Join the other ranks and make Megatron's process groups; a process has one layout.

    Raises:
        PolicyError: the process has another layout, or the other ranks did not join before the deadline.
    """
    if device.type == "cpu":
        redirect_cuda_to_cpu()
    join(layout, device)
    sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size)
    if parallel_state.is_initialized():
        if sizes != _current_sizes():
            raise PolicyError(f"tensor, pipeline, data parallel = {sizes} in a process of {_current_sizes()}")
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_parallel_size,
        distributed_timeout_minutes=max(1, round(layout.timeout_s / 60)),
        create_gloo_process_groups=False,
    )


def tensor_group() -> dist.ProcessGroup:
    """Return the group of ranks that share every layer with this one."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """Return the group of ranks that hold the other stages for the same samples."""
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """Return the group of ranks that hold the same shard of the same stage for other samples."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())


def model_parallel_group() -> dist.ProcessGroup:
    """Return the group of ranks that hold one copy of the model together with this one."""
    return cast(dist.ProcessGroup, parallel_state.get_model_parallel_group())


def tensor_rank() -> int:
    """Return this rank's index among the ranks that share every layer."""
    return dist.get_rank(tensor_group())


def stage() -> int:
    """Return this rank's stage, from 0."""
    return dist.get_rank(pipeline_group())


def is_first_stage() -> bool:
    return stage() == 0


def is_last_stage() -> bool:
    return stage() == dist.get_world_size(pipeline_group()) - 1


def _current_sizes() -> tuple[int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
