"""Weights in the memory of a CUDA device that the policy's one rank and the engine's one worker share."""

import io
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler

import torch
from torch.multiprocessing.reductions import reduce_tensor

from nemo_rl.interfaces import DeviceWeights, Generation, Policy, WeightEntry, Weights
from nemo_rl.weight_sync.shared_memory import ALIGNMENT, make_weight_entry

_HELD: dict[str, torch.Tensor] = {}  # in the policy's process: what an engine may be reading


@dataclass(frozen=True, slots=True)
class HoldWeights:
    """Copies the weights into one allocation of their device, which stays until `FreeWeights`. Picklable."""

    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> DeviceWeights:
        tensors = [(name, tensor.detach()) for name, tensor in weights]
        entries: list[WeightEntry] = []
        end = 0
        for name, tensor in tensors:
            entries.append(make_weight_entry(name, tensor, end))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        held = torch.empty(end, dtype=torch.uint8, device=tensors[0][1].device)
        for entry, (_, tensor) in zip(entries, tensors, strict=True):
            num_bytes = tensor.numel() * tensor.element_size()
            held[entry.offset : entry.offset + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        torch.cuda.synchronize(held.device)  # the engine's process does not know of this stream
        _HELD[self.key] = held
        return DeviceWeights(pickled_handle(held), tuple(entries))


@dataclass(frozen=True, slots=True)
class FreeWeights:
    """Frees what `HoldWeights` with the same key holds; does not read the weights. Picklable."""

    key: str

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        _HELD.pop(self.key, None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine may need it


def pickled_handle(tensor: torch.Tensor) -> bytes:
    """Return the bytes that rebuild a tensor over the same memory elsewhere; see generation/weight_reading.py."""
    _, arguments = reduce_tensor(tensor)
    content = io.BytesIO()
    ForkingPickler(content).dump(arguments)
    return content.getvalue()


class CudaIpc:
    """The transport `cuda_ipc`: the engine's worker copies from an allocation of the policy, which is freed then."""

    def __init__(self) -> None:
        self._hold = HoldWeights()

    async def stage(self, policy: Policy) -> DeviceWeights:
        return await policy.run_with_weights(self._hold)

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        try:
            await generation.update_weights(staged, weight_version)
        finally:
            await policy.run_with_weights(FreeWeights(self._hold.key))

    def close(self) -> None:
        """Do nothing: nothing is held between refits."""
