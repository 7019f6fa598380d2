"""Shards of tensors over ranks (DTensor): the whole of one, a rank's own part, and how many ranks hold the same."""

import math
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a shard; all ranks call it together. A whole tensor is not copied."""
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


def own_part(tensor: torch.Tensor) -> tuple[tuple[slice, ...], torch.Tensor]:
    """Return the index of this rank's shard in the whole tensor, and its memory."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape), tensor.detach()
    local, chunks = tensor.to_local().detach(), tensor.__create_chunk_list__()
    return tuple(slice(o, o + n) for o, n in zip(chunks[0].offsets, chunks[0].sizes, strict=True)), local


def with_own_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded like `tensor` and of which this rank has `part`, without a copy."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def num_holders(parameter: nn.Parameter, num_ranks: int) -> int:
    """Return how many of all ranks hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return num_ranks
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return num_ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())
