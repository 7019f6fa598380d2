"""The transport `shared_memory`: a file that the policy writes and engines on its machine map."""

import atexit
import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nemo_rl.config.layout import Layout
from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.distributed.weight_files import PREFIX, SUFFIX, default_directory, remove_stale_weight_files
from nemo_rl.errors import WeightSyncError
from nemo_rl.interfaces import WeightSource, WeightTarget
from nemo_rl.weight_manifests import WeightEntry, WeightManifest, Weights

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes; alignment of tensors in a file or a chunk

_FILES: dict[str, "WeightFile"] = {}  # open in this process, which is the policy's and may not be the driver's


class SharedMemory:
    """Lets the policy rewrite one file at each refit, and engines on its machine map it."""

    def __init__(self) -> None:
        self._write = WriteWeightFile()
        self._path: Path | None = None

    async def stage(self, policy: WeightSource) -> WeightManifest:
        manifest = await policy.run_with_weights(self._write)
        self._path = Path(manifest.path)
        return manifest

    async def deliver(
        self, policy: WeightSource, generation: WeightTarget, staged: Weights, weight_version: int
    ) -> None:
        await generation.update_weights(staged, weight_version)

    def close(self) -> None:
        """Remove the file, even if another process of this machine wrote it."""
        close_weight_file(self._write.key)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


@dataclass(frozen=True, slots=True)
class WriteWeightFile:
    """Writes the weight file `key` of the process that calls it; the file stays open there. Picklable."""

    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        if self.key not in _FILES:
            _FILES[self.key] = WeightFile()
            atexit.register(close_weight_file, self.key)
        return _FILES[self.key].write(weights)


def close_weight_file(key: str) -> None:
    """Remove this process's file `key`, if it exists."""
    if file := _FILES.pop(key, None):
        file.close()


class WeightFile:
    """A file that one trainer writes weights to; readers map it after `write` and before the next one.

    `directory` None: shared memory, or the temporary directory if that is missing or full. The file is locked while it
    is open and removed by `close`. The constructor removes stale files of killed runs.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory()
        remove_stale_weight_files(self._directory)
        self._file, self.path = create_locked_file(self._directory)
        self._capacity = 0  # bytes
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the mapped file

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy each tensor, from any device, into the file; raises WeightSyncError if there is no room."""
        entries: list[WeightEntry] = []
        end = 0
        for name, tensor in weights:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            end = offset + tensor.numel() * tensor.element_size()
            if end > self._capacity:
                self._grow(end + end // 2)
            target = self._bytes[offset:end].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor.detach())
            entries.append(make_weight_entry(name, tensor, offset))
        return WeightManifest(str(self.path), tuple(entries))

    def _grow(self, capacity: int) -> None:
        """Allocate before mapping: writing to a mapped page without memory would kill the process."""
        try:
            os.posix_fallocate(self._file, 0, capacity)
        except OSError as error:
            fallback = Path(tempfile.gettempdir())
            if error.errno != errno.ENOSPC or self._directory == fallback:
                raise WeightSyncError(f"no room for {capacity / 2**20:.0f} MiB of weights in {self.path}") from error
            logger.warning("no space in %s; falling back to %s for weight transfer (slower)", self._directory, fallback)
            self._move(fallback)
            self._grow(capacity)
            return
        self._bytes = torch.frombuffer(mmap.mmap(self._file, capacity), dtype=torch.uint8)
        self._capacity = capacity

    def _move(self, directory: Path) -> None:
        file, path = create_locked_file(directory)
        shutil.copyfile(self.path, path)
        self._remove()
        self._directory, self._file, self.path = directory, file, path

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)

    def close(self) -> None:
        """Remove the file; may be called twice."""
        if self._file < 0:
            return
        self._remove()
        self._file, self._capacity = -1, 0
        self._bytes = torch.empty(0, dtype=torch.uint8)


def create_locked_file(directory: Path) -> tuple[int, Path]:
    """Create a file that is locked before it gets the name pattern by which other runs find stale files."""
    name = f"{PREFIX}{os.getpid()}_{secrets.token_hex(4)}{SUFFIX}"
    unlocked = directory / f".{name}"
    file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(unlocked, directory / name)
    return file, directory / name


def make_weight_entry(name: str, tensor: torch.Tensor, offset: int) -> WeightEntry:
    """Return the entry of a tensor that begins `offset` bytes after the start."""
    return WeightEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


def make_shared_memory(section: WeightSyncConfig, layout: Layout) -> SharedMemory:
    return SharedMemory()
