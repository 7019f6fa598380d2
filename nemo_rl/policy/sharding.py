"""FSDP2 around a model: sharded float32 weights, computation in the policy's precision."""

import math
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.policy.hf_model import decoder_layers
from nemo_rl.policy.ranks import RankLayout, device_mesh, join
from nemo_rl.policy.tensor_parallel import split_layers


def needs_sharding(config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> bool:
    """False for a rank alone in float32 on a CPU: nothing to shard, move or cast, and the hooks only cost time."""
    return layout.init_method is not None or device.type == "cuda" or config.precision == "bfloat16"


def frozen_needs_sharding(config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> bool:
    """The same of a model without gradients: alone it is cast and moved as it is, but for weights kept off the GPU."""
    return layout.world_size > 1 or (device.type == "cuda" and config.dtensor_cfg.cpu_offload)


def shard(module: nn.Module, config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> None:
    """Split each decoder layer over tensor-parallel ranks, then put it, and the rest as one, under FSDP2.

    Weights and gradients keep their type. In bfloat16 the weights are cast when a layer gathers them and gradients are
    reduced in float32. A layer moves to the device on its own, so that the whole model never lies there.
    """
    join(layout, device)
    mesh = device_mesh(layout, device)
    if layout.tensor_parallel_size > 1:
        split_layers(module, mesh)
    param_dtype = torch.bfloat16 if config.precision == "bfloat16" else None
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.dtensor_cfg.cpu_offload else OffloadPolicy()
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh["dp"], mp_policy=precision, offload_policy=offload)
    fully_shard(module, mesh=mesh["dp"], mp_policy=precision, offload_policy=offload)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor behind a shard, which all ranks ask for together; no copy where one rank holds it all."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    # An offloaded part goes to where the ranks exchange.
    gathered = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    placements = list(tensor.placements)
    for dim in range(len(placements)):  # one after the other: of two at once torch warns
        placements[dim] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    return gathered.to_local()


def num_holders(parameter: nn.Parameter, num_ranks: int) -> int:
    """How many of all ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return num_ranks
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return num_ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())
