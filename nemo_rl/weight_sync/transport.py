"""What a way for weights from a policy to engines is, and the plainest one: a file in shared memory."""

import atexit
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_rl.interfaces import Generation, Policy, WeightManifest, Weights
from nemo_rl.weight_sync.weight_file import WeightFile

if TYPE_CHECKING:
    import torch

_FILES: dict[str, WeightFile] = {}  # open in this process: a policy's, which may not be the driver's


class Transport(Protocol):
    """One way for weights. Tensors go straight from the policy's process to the engines'; the driver sees metadata."""

    async def stage(self, policy: Policy) -> Weights:
        """Make the policy's weights available, while the engines still work."""
        ...

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        """Load them into all engines, which are paused."""
        ...

    def close(self) -> None:
        """Free what is held; may be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class WriteWeightFile:
    """Writes the weight file `key` of the process that it is called in; the file stays open there. Picklable."""

    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def __call__(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> WeightManifest:
        if self.key not in _FILES:
            _FILES[self.key] = WeightFile()
            atexit.register(close_weight_file, self.key)
        return _FILES[self.key].write(weights)


def close_weight_file(key: str) -> None:
    """Remove the file `key` of this process, if it has it."""
    if file := _FILES.pop(key, None):
        file.close()


class SharedMemory:
    """A file that the policy writes and engines on the same machine map; one file, written again at each refit."""

    def __init__(self) -> None:
        self._write = WriteWeightFile()
        self._path: Path | None = None

    async def stage(self, policy: Policy) -> WeightManifest:
        manifest = await policy.run_with_weights(self._write)
        self._path = Path(manifest.path)
        return manifest

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        await generation.update_weights(staged, weight_version)

    def close(self) -> None:
        """Remove the file, whichever process of this machine wrote it."""
        close_weight_file(self._write.key)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
