"""Moving a model's parts between the accelerator and host memory that is kept, pinned, from one move to the next.

A part moves by the storages of its tensors: their bytes are copied and the storage is emptied in place. Tensors
that share a storage (tied weights, views, FSDP2's flat shards) need no care, and no object is replaced.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nemo_rl.interfaces import OffloadPart

CHUNK_BYTES = 2**28  # a power of two: torch rounds the size of pinned memory up to one


@dataclass(slots=True)
class _HostCopy:
    """The host memory of one part, and the storages that it currently holds."""

    chunks: list[torch.Tensor] = field(default_factory=list)  # uint8, of equal size
    away: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)  # emptied, with their bytes
    frozen: list[tuple[int, int]] = field(default_factory=list)  # storages whose values the chunks hold for good
    arrival: Any = None  # event after the copies of its return; None once the current stream waits for it


class ReturnStream:
    """The stream on which parts return, beside the computation; on a CPU a copy is done when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Queue the copies inside after all that the current stream has been given."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def record(self) -> Any:
        """Return an event after the copies so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def let_current_wait(self, event: Any) -> None:
        """Let the current stream wait for an event; the host continues."""
        assert self._stream is not None
        torch.cuda.current_stream(self._stream.device).wait_event(event)


class Offloader:
    """Moves parts off a device and back, each through buffers that are made once and grow with the part.

    Copies to the host are queued on the current stream and awaited together, by one synchronization. Copies back run on
    a stream of their own, part by part in the order of `onload`: a user of a part calls `await_arrival`, and computes
    with it while the next ones arrive. The values of `frozen` parts never change, so they are copied out once. On a CPU
    the same code runs with unpinned memory, to no gain.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        frozen: Iterable[OffloadPart] = (),
        chunk_bytes: int = CHUNK_BYTES,
        synchronize_device: Callable[[], None] | None = None,
        stream: ReturnStream | None = None,
    ) -> None:
        self._device = device
        self._frozen = frozenset(frozen)
        self._chunk_bytes = chunk_bytes
        self._synchronize = synchronize_device or (lambda: synchronize(device))
        self._stream = stream or ReturnStream(device)
        self._copies: dict[OffloadPart, _HostCopy] = {}

    def is_away(self, part: OffloadPart) -> bool:
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
            self.await_arrival([part])
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
        """Begin to copy the parts that are away back to the device, in this order; `await_arrival` before their use."""
        for copy in [self._copies[part] for part in parts if self.is_away(part)]:
            for storage, size in copy.away:
                storage.resize_(size)
            with self._stream.copies():
                self._copy(copy, to_host=False)
            copy.arrival = self._stream.record()
            copy.away = []

    def await_arrival(self, parts: Iterable[OffloadPart]) -> None:
        """Let what is queued next on the current stream find these parts on the device."""
        for copy in [self._copies[part] for part in parts if part in self._copies]:
            if copy.arrival is not None:
                self._stream.let_current_wait(copy.arrival)
                copy.arrival = None

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


def synchronize(device: torch.device) -> None:
    """Wait for all work of a CUDA device; a no-op on others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
