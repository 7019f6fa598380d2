"""Weights on their way from the policy to an engine: a manifest type per transport of weight_sync/."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One tensor in a weight file."""

    name: str  # name in the Hugging Face checkpoint
    dtype: str  # torch's name, e.g. "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file; a multiple of 64


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """The policy's own tensors, for an engine in its process, which copies them and writes to none of them."""

    tensors: "tuple[tuple[str, torch.Tensor], ...]"  # (name in the Hugging Face checkpoint, tensor)


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Weights for an engine on this machine: a file in shared memory, and its entries."""

    path: str
    entries: tuple[WeightEntry, ...]


@dataclass(frozen=True, slots=True)
class WeightChunks:
    """Weights in the object store of a cluster: the bytes of a weight file, which each machine writes once."""

    name: str  # digest of the file; machines write it again if `transfer` differs
    transfer: int  # counts the refits
    chunks: tuple[Any, ...]  # references to arrays of bytes, to be concatenated (distributed/actors.py)
    entries: tuple[WeightEntry, ...]


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """Weights that each policy rank hands to the engine worker on its own device (distributed/tensor_transfer.py)."""

    token: str  # rendezvous token
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Weights that the policy broadcasts to all engine workers at once (distributed/tensor_transfer.py)."""

    host: str  # the store in which the members meet
    port: int
    group: int  # counts the groups: another one is joined if it differs
    members: tuple[str, ...]  # names: the policy's first rank, then each worker of each engine
    engine: str  # the name of the engine that is told this
    backend: str  # "nccl", on a CPU "gloo"
    timeout_s: float


def with_policy_index(name: str, index: int) -> str:
    """Return the name of an adapter's tensor among those of all policies of a run, by the index of its policy.

    Example: `with_policy_index("base_model.model.q.lora_A.weight", 1)` is "1:base_model.model.q.lora_A.weight".
    """
    return f"{index}:{name}"


def split_policy_index(name: str) -> tuple[int, str]:
    """Invert `with_policy_index`; a name without an index is that of a run's only policy, of index 0."""
    index, separator, own = name.partition(":")
    return (int(index), own) if separator else (0, name)


def bytes_of(weights: "Weights") -> int | None:
    """Return the bytes of weights that are staged; None if unknown: they go from device to device, or are quantized."""
    if isinstance(weights, LocalWeights):
        return sum(tensor.nbytes for _, tensor in weights.tensors)
    if not isinstance(weights, WeightManifest | WeightChunks):
        return None
    if all(entry.dtype in BYTES_BY_DTYPE for entry in weights.entries):
        return sum(math.prod(entry.shape) * BYTES_BY_DTYPE[entry.dtype] for entry in weights.entries)
    return None


Weights: TypeAlias = LocalWeights | WeightManifest | WeightChunks | DeviceWeights | WeightStream
