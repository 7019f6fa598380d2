"""Tensors of NeMo-RL's checkpoints, read without running what a file names.

DistributedTensors   .metadata and *.distcp of torch.distributed.checkpoint: DTensor policies with model_save_format
                     "torch_save" or before 0.6, and Megatron's torch_dist
SafetensorsShards    *.safetensors of every rank, with its shards' offsets in the header: DTensor policies since 0.6
"""

import io
import json
import math
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import filesystem, metadata

from nemo_rl.errors import CheckpointError, describe_error

METADATA_FILE = ".metadata"
SAFETENSORS = "*.safetensors"
OFFSETS_KEY = "DCP_SHARDING_INFO"  # torch 2.9, torch/distributed/checkpoint/_hf_utils.py
# What the description of a checkpoint is made of; pickle makes everything else inert.
DESCRIPTIONS: dict[tuple[str, str], type] = {
    **{
        (metadata.__name__, one.__name__): one
        for one in (
            metadata.Metadata,
            metadata.TensorStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.MetadataIndex,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
}
Part = tuple[Sequence[int], torch.Tensor]  # a shard, and its offsets in the whole tensor


class SavedTensors(ABC):
    """The tensors in a directory of a checkpoint, each in one or several shards.

    Attributes:
        shapes: of the whole tensors, by the keys under which they were saved.
    """

    def __init__(self, directory: Path) -> None:
        """Read the shapes; raises CheckpointError if they cannot be read."""
        self.directory = directory
        try:
            self.shapes = self._read_shapes()
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(f"{directory} cannot be read: {describe_error(error)}") from error

    def read(self, key: str) -> torch.Tensor:
        """Return a whole tensor; raises CheckpointError if shards are missing or cannot be read."""
        try:
            return _join(self.shapes[key], self._read_parts(key))
        except Exception as error:
            raise CheckpointError(f"{self.directory}: {key} cannot be read: {describe_error(error)}") from error

    @abstractmethod
    def _read_shapes(self) -> dict[str, tuple[int, ...]]: ...

    @abstractmethod
    def _read_parts(self, key: str) -> Iterator[Part]: ...


def _join(shape: tuple[int, ...], parts: Iterator[Part]) -> torch.Tensor:
    """Return a tensor of the shape from shards that cover it once; raises ValueError if they do not."""
    whole: torch.Tensor | None = None
    is_written = torch.zeros(shape, dtype=torch.bool)
    for offsets, part in parts:
        if whole is None:
            whole = torch.empty(shape, dtype=part.dtype)
        place = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        if part.dtype != whole.dtype or min(offsets, default=0) < 0 or whole[place].shape != part.shape:
            raise ValueError(f"a shard {tuple(part.shape)} of {part.dtype} at {tuple(offsets)} does not fit {shape}")
        if is_written[place].any():
            raise ValueError(f"a shard {tuple(part.shape)} at {tuple(offsets)} overlaps another")
        whole[place] = part
        is_written[place] = True
    if whole is None or not is_written.all():
        raise ValueError(f"its shards hold {int(is_written.sum())} of {math.prod(shape)} values")
    return whole


class DistributedTensors(SavedTensors):
    """Tensors that torch.distributed.checkpoint wrote, in whatever number of processes."""

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        with (self.directory / METADATA_FILE).open("rb") as file:
            self._metadata = DescriptionUnpickler(file).load()
        num_bytes = sum(path.stat().st_size for path in self.directory.iterdir())
        shapes = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, metadata.TensorStorageMetadata):
                shapes[key] = tuple(int(size) for size in entry.size)
                if min(shapes[key], default=1) < 0 or math.prod(shapes[key]) > num_bytes:
                    raise ValueError(f"{key} of the shape {shapes[key]} is larger than the files")
        return shapes

    def _read_parts(self, key: str) -> Iterator[Part]:
        for chunk in self._metadata.state_dict_metadata[key].chunks:
            stored = self._metadata.storage_data[metadata.MetadataIndex(key, chunk.offsets)]
            name = str(stored.relative_path)
            if Path(name).name != name or getattr(stored, "transform_descriptors", None):
                raise ValueError(f"{name!r} is not an uncompressed file of the directory")
            part = _load_stored(self.directory / name, int(stored.offset), int(stored.length))
            if tuple(part.shape) != tuple(chunk.sizes):
                raise ValueError(f"a shard in {name} has the shape {tuple(part.shape)}, not {tuple(chunk.sizes)}")
            yield chunk.offsets, part


def _load_stored(path: Path, offset: int, length: int) -> torch.Tensor:
    """Return the tensor that `torch.save` wrote to a range of a file."""
    if offset < 0 or length < 0 or offset + length > path.stat().st_size:
        raise ValueError(f"{path.name} is too short")
    with path.open("rb") as file:
        file.seek(offset)
        data = io.BytesIO(file.read(length))
    with zipfile.ZipFile(data) as archive:
        if sum(one.file_size for one in archive.infolist()) > length:
            raise ValueError(f"{path.name} holds compressed tensors")
    data.seek(0)
    tensor = torch.load(data, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.is_floating_point():
        raise ValueError(f"{path.name} holds a {type(tensor).__name__} in place of numbers")
    return tensor


class DescriptionUnpickler(pickle.Unpickler):
    """Reads `.metadata`: descriptions of tensors; every other name in it becomes an object that does nothing."""

    def find_class(self, module: str, name: str) -> type:
        return DESCRIPTIONS.get((module, name), Inert)


class Inert:
    """Stands for any class or function that a pickle names."""

    def __new__(cls, *arguments: Any, **named: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class SafetensorsShards(SavedTensors):
    """Tensors in safetensors files, one per rank, or whole ones."""

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        self._places: dict[str, list[tuple[Path, list[int]]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(self.directory.glob(SAFETENSORS)):
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get(OFFSETS_KEY)
                offsets_by_key = None if text is None else json.loads(text)
                for key in file.keys():  # noqa: SIM118 - no mapping
                    sizes = file.get_slice(key).get_shape()
                    offsets = [0] * len(sizes)
                    if offsets_by_key is not None:
                        offsets = [int(start) for start in offsets_by_key[key]["saved_offsets"]]
                    self._places.setdefault(key, []).append((path, offsets))
                    ends = [start + size for start, size in zip(offsets, sizes, strict=True)]
                    shapes[key] = tuple(map(max, ends, shapes.get(key, ends)))
        num_bytes = sum(path.stat().st_size for path in self.directory.iterdir())
        for key, shape in shapes.items():
            if math.prod(shape) > num_bytes:
                raise ValueError(f"{key} of the shape {shape} is larger than the files")
        return shapes

    def _read_parts(self, key: str) -> Iterator[Part]:
        for path, offsets in self._places[key]:
            with safe_open(path, framework="pt") as file:
                yield offsets, file.get_tensor(key)
