"""Moving a model's parts between the accelerator and host memory that is kept, pinned, from one move to the next.

A part moves by the storages of its tensors: their bytes are copied and the storage is emptied in place. So whatever
shares a storage (tied weights, views, the flat shards of FSDP2) needs no care, and no object is replaced.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nemo_rl.distributed.devices import memory_of_device
from nemo_rl.interfaces import OffloadPart

CHUNK_BYTES = 2**28  # a power of two: torch rounds the size of pinned memory up to one


@dataclass(slots=True)
class _HostCopy:
    """The host memory of one part, and the storages that are in it at the moment."""

    chunks: list[torch.Tensor] = field(default_factory=list)  # uint8, of equal size
    away: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)  # emptied, with their bytes
    frozen: list[tuple[int, int]] = field(default_factory=list)  # storages whose values the chunks hold for good


class Offloader:
    """Moves parts off a device and back, each through buffers that are made once and grow with the part.

    Copies of one move are queued on the current stream and awaited together, by one synchronization. The values of
    `frozen` parts never change, so they are copied out once. On a CPU, where there is nothing to gain, the same code
    runs with memory that is not pinned.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        frozen: Iterable[OffloadPart] = (),
        chunk_bytes: int = CHUNK_BYTES,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._device = device
        self._frozen = frozenset(frozen)
        self._chunk_bytes = chunk_bytes
        self._synchronize = synchronize or (lambda: _synchronize(device))
        self._copies: dict[OffloadPart, _HostCopy] = {}

    def is_away(self, part: OffloadPart) -> bool:
        """Return whether the part is off the device."""
        return part in self._copies and bool(self._copies[part].away)

    def buffers(self, part: OffloadPart) -> list[torch.Tensor]:
        """Return the host memory of a part."""
        return list(self._copies[part].chunks) if part in self._copies else []

    @torch.no_grad()
    def offload(self, parts: Mapping[OffloadPart, Iterable[torch.Tensor]]) -> None:
        """Copy the tensors of each part to the host and free their memory on the device; once for a part that is away.

        The tensors are unusable until `onload`.
        """
        leaving: list[torch.UntypedStorage] = []
        for part, tensors in parts.items():
            copy = self._copies.setdefault(part, _HostCopy())
            if copy.away:
                continue
            copy.away = [(storage, storage.nbytes()) for storage in _storages(tensors, self._device)]
            identities = [(storage._cdata, size) for storage, size in copy.away]
            if part not in self._frozen or identities != copy.frozen:
                self._copy(copy, to_host=True)
                copy.frozen = identities
            leaving += [storage for storage, _ in copy.away]
        if not leaving:
            return
        self._synchronize()
        for storage in leaving:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def onload(self, parts: Iterable[OffloadPart]) -> None:
        """Copy the parts that are away back to the device."""
        returning = [self._copies[part] for part in parts if self.is_away(part)]
        for copy in returning:
            for storage, size in copy.away:
                storage.resize_(size)
            self._copy(copy, to_host=False)
            copy.away = []
        if returning:
            self._synchronize()

    def _copy(self, copy: _HostCopy, *, to_host: bool) -> None:
        """Queue the copies of one part, whose storages are laid out one after another in its chunks."""
        position = 0
        for storage, size in copy.away:
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < size:
                host = self._chunk(copy, position // self._chunk_bytes)[position % self._chunk_bytes :]
                num_bytes = min(len(host), size - start)
                host, device = host[:num_bytes], content[start : start + num_bytes]
                if to_host:
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)
                start, position = start + num_bytes, position + num_bytes

    def _chunk(self, copy: _HostCopy, index: int) -> torch.Tensor:
        while len(copy.chunks) <= index:
            pin = self._device.type == "cuda"
            copy.chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pin))
        return copy.chunks[index]


def optimizer_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Yield each storage on the device once: weights that are kept on the CPU stay there."""
    seen: set[int] = set()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.device.type == device.type and storage.nbytes() > 0 and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


TRAINING_BYTES = 12  # per parameter: a gradient and two moments of Adam in float32, which are made by the first step
UNSHARDED_BYTES = 6  # per parameter on several ranks: its gathered bfloat16 weight and float32 gradient
ACTIVATION_SHARE = 0.15  # of the device's memory


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The memory of a rank's device, in bytes, with policy and engine on it; and the model's size."""

    num_parameters: int
    free_bytes: int
    total_bytes: int

    def holds_training(self, num_shards: int) -> bool:
        """Return whether the policy can train without offloading anything, its state split over `num_shards` ranks.

        Example: 1.5e9 parameters on one rank need 18 GB and, of 141 GB, 21 GB for activations.
        """
        per_parameter = TRAINING_BYTES / num_shards + (UNSHARDED_BYTES if num_shards > 1 else 0)
        needed = per_parameter * self.num_parameters + ACTIVATION_SHARE * self.total_bytes
        return needed <= self.free_bytes


@dataclass(frozen=True, slots=True)
class MeasureRoom:
    """Measures the device of the rank that it is called on, with the policy's weights. Picklable."""

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> DeviceRoom:
        num_parameters = sum(tensor.numel() for _, tensor in weights)
        return DeviceRoom(num_parameters, *memory_of_device())
