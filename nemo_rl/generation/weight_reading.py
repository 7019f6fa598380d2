"""The engine's half of weights in host memory: tensors read in place. The trainer's half: weight_sync/."""

import mmap
from collections.abc import Iterator

import torch

from nemo_rl.errors import WeightSyncError
from nemo_rl.weight_manifests import LocalWeights, WeightEntry, WeightManifest, Weights


def map_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights without a copy, from a file or from this process; callers copy them and never write to them.

    Raises WeightSyncError for weights elsewhere.
    """
    if isinstance(weights, LocalWeights):
        yield from weights.tensors
        return
    if not isinstance(weights, WeightManifest):
        raise WeightSyncError(f"weights are read from a file or from this process, not as {type(weights).__name__}")
    with open(weights.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for entry in weights.entries:
        yield entry.name, view_entry(content, entry)


def view_entry(content: mmap.mmap, entry: WeightEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
