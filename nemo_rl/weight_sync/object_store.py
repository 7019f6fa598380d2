"""Weights through a cluster's object store: for engines on machines that share no memory with the policy's."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from nemo_rl.distributed.actors import put_bytes
from nemo_rl.distributed.machine import PREFIX, SUFFIX
from nemo_rl.interfaces import Generation, Policy, WeightChunks, WeightEntry, Weights
from nemo_rl.weight_sync.shared_memory import ALIGNMENT, make_weight_entry

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PutWeights:
    """Puts the weights into the object store of the process that it is called in, chunk by chunk. Picklable."""

    name: str
    transfer: int
    chunk_bytes: int = CHUNK_BYTES

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightChunks:
        entries: list[WeightEntry] = []
        chunks: list[object] = []
        parts: list[torch.Tensor] = []
        start = end = 0  # of the chunk, in the file
        for name, tensor in weights:
            content = to_bytes(tensor)
            entries.append(make_weight_entry(name, tensor, end))
            parts += [content, torch.zeros(-len(content) % ALIGNMENT, dtype=torch.uint8)]
            end += len(content) + len(parts[-1])
            if end - start >= self.chunk_bytes:
                chunks.append(put_bytes(torch.cat(parts).numpy()))
                parts, start = [], end
        if parts:
            chunks.append(put_bytes(torch.cat(parts).numpy()))
        return WeightChunks(self.name, self.transfer, tuple(chunks), tuple(entries))


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class ObjectStore:
    """The transport `object_store`: rank 0 puts chunks; one engine of each machine writes them into a file for all."""

    def __init__(self) -> None:
        self._name = f"{PREFIX}node_{secrets.token_hex(8)}{SUFFIX}"
        self._transfer = 0

    async def stage(self, policy: Policy) -> WeightChunks:
        self._transfer += 1
        return await policy.run_with_weights(PutWeights(self._name, self._transfer))

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        await generation.update_weights(staged, weight_version)

    def close(self) -> None:
        """Do nothing: the engines remove the files when they end."""
