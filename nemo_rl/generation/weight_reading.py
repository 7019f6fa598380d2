"""The engine's half of a weight file: its tensors, read where they lie. The trainer's half: weight_sync/."""

import mmap
from collections.abc import Iterator

import torch

from nemo_rl.interfaces import WeightEntry, WeightManifest


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
