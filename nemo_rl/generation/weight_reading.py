"""The engine's half of weights in a file or on a device: tensors read where they lie. The trainer's: weight_sync/."""

import mmap
import pickle
from collections.abc import Iterator

import torch

from nemo_rl.interfaces import DeviceWeights, WeightEntry, WeightManifest

DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor, torch 2.13


def map_weights(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a manifest, read where they lie: copy them before the file is written again."""
    with open(manifest.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for entry in manifest.entries:
        yield entry.name, view_entry(content, entry)


def view_entry(content: mmap.mmap, entry: WeightEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


def device_weights(weights: DeviceWeights, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in another process' allocation on `device`; whoever holds it keeps it until they are copied."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(pickle.loads(weights.handle))
    arguments[DEVICE_ARGUMENT] = device.index  # processes may number the same device differently
    held = rebuild_cuda_tensor(*arguments)
    for entry in weights.entries:
        dtype = getattr(torch, entry.dtype)
        num_bytes = torch.Size(entry.shape).numel() * dtype.itemsize
        yield entry.name, held[entry.offset : entry.offset + num_bytes].view(dtype).view(entry.shape)
