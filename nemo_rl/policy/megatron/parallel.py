"""Megatron's process groups, made from a rank's layout."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

from nemo_rl.errors import PolicyError
from nemo_rl.policy.megatron.backend import MegatronConfig
from nemo_rl.policy.ranks import RankLayout, join


@lru_cache(maxsize=1)
def redirect_cuda_to_cpu() -> None:
    """Make the CPU torch.cuda's current device, and moves to it and synchronization no-ops."""
    module: Any = torch.cuda
    module.current_device = _cpu_device
    module.synchronize = _no_op
    stream = _CpuStream()
    module.Stream = module.current_stream = lambda *_, **__: stream
    module.stream = nullcontext
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_to_numpy
    tensor: Any = torch.Tensor
    tensor.cuda = _return_self


class _CpuStream:
    """A stream whose operations have always ended; it is its own event."""

    def record_event(self, *_: Any) -> "_CpuStream":
        return self

    def synchronize(self) -> None:
        pass


def _splits_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the sizes of all-to-all's parts as an array, which megatron-core 0.16.1 makes of tensors on CUDA alone."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


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


def make_groups(layout: RankLayout, device: torch.device, section: MegatronConfig) -> None:
    """Join the other ranks and make Megatron's process groups; a process has one layout.

    Ranks that share micro-batches are data-parallel ranks to Megatron: it sums their gradients alike.

    The ranks of a stage form two meshes: (data x tensor parallel), and for experts (data x expert x tensor parallel)
    with sizes of its own.

    Raises:
        PolicyError: the process has another layout, or the other ranks did not join before the deadline.
        ConfigError: the ranks that hold a layer's experts do not divide those of a stage.
    """
    if device.type == "cpu":
        redirect_cuda_to_cpu()
    join(layout, device)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # megatron-core 0.16.1 reads the name also without TransformerEngine
    sizes = (
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        layout.num_shards,
        section.expert_model_parallel_size,
        section.expert_tensor_parallel_size,
    )
    if parallel_state.is_initialized():
        if sizes != _current_sizes():
            names = "tensor, pipeline, data, expert, expert tensor parallel"
            raise PolicyError(f"{names} = {sizes} in a process of {_current_sizes()}")
        return
    section.experts_on(layout.data_parallel_size, key="megatron_cfg")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_parallel_size,
        expert_model_parallel_size=section.expert_model_parallel_size,
        expert_tensor_parallel_size=section.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(layout.timeout_s / 60)),
        create_gloo_process_groups=False,
    )


def device() -> torch.device:
    """Return the device that Megatron computes on."""
    return torch.device(torch.cuda.current_device())


def tensor_group() -> dist.ProcessGroup:
    """Return the group of ranks that share every layer with this one."""
    return cast(dist.ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def pipeline_group() -> dist.ProcessGroup:
    """Return the group of ranks that hold the other stages for the same samples."""
    return cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())


def data_group() -> dist.ProcessGroup:
    """Return the group of ranks that hold the same shard of the same stage for other tokens."""
    return cast(dist.ProcessGroup, parallel_state.get_data_parallel_group())


def expert_group() -> dist.ProcessGroup:
    """Return the group of ranks that together hold one copy of the experts of this stage."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_and_model_parallel_group())


def expert_tensor_group() -> dist.ProcessGroup:
    """Return the group of ranks that share each of this rank's experts."""
    return cast(dist.ProcessGroup, parallel_state.get_expert_tensor_parallel_group())


def data_group_of(parameter: torch.Tensor) -> dist.ProcessGroup:
    """Return the group of ranks that hold the same of a parameter: a weight of experts has another one."""
    if getattr(parameter, "allreduce", True):
        return data_group()
    return cast(dist.ProcessGroup, parallel_state.get_expert_data_parallel_group())


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


def _current_sizes() -> tuple[int | None, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
