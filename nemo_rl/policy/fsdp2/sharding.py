"""FSDP2 and tensor parallelism around a model: which ranks hold which shard of its weights."""

import math
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.policy.fsdp2.backend import DTensorConfig
from nemo_rl.policy.hf_model import decoder_layers
from nemo_rl.policy.ranks import RankLayout, device_mesh, join

_HEADS_DIM = 2  # of [B, T, heads, width of a head], which the norms of Qwen3's queries and keys see


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each layer's matrices by this rank's shards of them; `mesh` has the dimension "tp"."""
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh["tp"], _plan(layer))


def _plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
        # Weights are replicated, and their gradients are summed over the ranks' heads.
        "self_attn.q_norm": SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
        "self_attn.k_norm": SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True),
    }
    present = dict(layer.named_modules())
    return {name: style for name, style in plan.items() if name in present}


def needs_sharding(config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> bool:
    """Return whether FSDP2 is of use: a single float32 rank on a CPU has nothing to shard, move or cast."""
    return layout.init_method is not None or device.type == "cuda" or config.precision == "bfloat16"


def frozen_needs_sharding(config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> bool:
    """Return whether FSDP2 is of use for a frozen model: on a single rank only if its weights are offloaded."""
    return layout.world_size > 1 or (device.type == "cuda" and config.section_of(DTensorConfig).cpu_offload)


def shard(module: nn.Module, config: PolicyConfig | TeacherConfig, layout: RankLayout, device: torch.device) -> None:
    """Split each decoder layer over the tensor-parallel ranks, then wrap the layers, and the rest as one, in FSDP2.

    Weights and gradients keep their dtype. In bfloat16, weights are cast when a layer gathers them and gradients are
    reduced in float32. Layers move to the device one at a time, so that it never holds the whole model.
    """
    join(layout, device)
    mesh = device_mesh(layout, device)
    if layout.tensor_parallel_size > 1:
        split_layers(module, mesh)
    param_dtype = torch.bfloat16 if config.precision == "bfloat16" else None
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    is_offloaded = config.section_of(DTensorConfig).cpu_offload
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if is_offloaded else OffloadPolicy()
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh["dp"], mp_policy=precision, offload_policy=offload)
    fully_shard(module, mesh=mesh["dp"], mp_policy=precision, offload_policy=offload)


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a shard; all ranks call it together. There is no copy where one rank holds it all."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    # An offloaded shard moves to the device that the ranks communicate on.
    gathered = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    placements = list(tensor.placements)
    for dim in range(len(placements)):  # one dimension at a time: torch warns of two at once
        placements[dim] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    return gathered.to_local()


def num_holders(parameter: nn.Parameter, num_ranks: int) -> int:
    """Return how many of all ranks hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return num_ranks
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return num_ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())
