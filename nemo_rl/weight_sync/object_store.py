"""The transport `object_store`: chunks in the cluster's object store, for engines on other machines than the policy."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from nemo_rl.config.layout import Layout
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.actors import put_bytes
from nemo_rl.distributed.weight_files import PREFIX, SUFFIX
from nemo_rl.interfaces import WeightSource, WeightTarget
from nemo_rl.weight_manifests import WeightChunks, WeightEntry, Weights
from nemo_rl.weight_sync.shared_memory import ALIGNMENT, make_weight_entry

CHUNK_BYTES = 64 * 2**20


class ObjectStore:
    """Lets rank 0 put chunks into the store; one engine per machine writes them into a file for all engines there."""

    def __init__(self) -> None:
        self._name = f"{PREFIX}node_{secrets.token_hex(8)}{SUFFIX}"
        self._transfer = 0

    async def stage(self, policy: WeightSource) -> WeightChunks:
        self._transfer += 1
        return await policy.run_with_weights(PutWeights(self._name, self._transfer))

    async def deliver(
        self, policy: WeightSource, generation: WeightTarget, staged: Weights, weight_version: int
    ) -> None:
        await generation.update_weights(staged, weight_version)

    def close(self) -> None:
        """Do nothing: the engines remove the files when they close."""


@dataclass(frozen=True, slots=True)
class PutWeights:
    """Puts the weights into the cluster's object store, chunk by chunk. Picklable."""

    name: str
    transfer: int
    chunk_bytes: int = CHUNK_BYTES

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightChunks:
        entries: list[WeightEntry] = []
        chunks: list[object] = []
        parts: list[torch.Tensor] = []
        start = end = 0  # bytes of the file: where the chunk starts and ends
        for name, tensor in weights:
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            entries.append(make_weight_entry(name, tensor, end))
            parts += [content, torch.zeros(-len(content) % ALIGNMENT, dtype=torch.uint8)]
            end += len(content) + len(parts[-1])
            if end - start >= self.chunk_bytes:
                chunks.append(put_bytes(torch.cat(parts).numpy()))
                parts, start = [], end
        if parts:
            chunks.append(put_bytes(torch.cat(parts).numpy()))
        return WeightChunks(self.name, self.transfer, tuple(chunks), tuple(entries))


def make_object_store(section: WeightSyncConfig, layout: Layout) -> ObjectStore:
    return ObjectStore()
