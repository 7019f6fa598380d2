"""Weights through host memory: the transport `shared_memory`, a file that the policy writes and engines on its machine
map, and `object_store`, chunks in a cluster's object store for engines on other machines."""

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

from nemo_rl.distributed.machine import PREFIX, SUFFIX, default_directory, remove_stale_weight_files
from nemo_rl.errors import WeightSyncError
from nemo_rl.interfaces import Generation, Policy, WeightChunks, WeightEntry, WeightManifest, Weights

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes
CHUNK_BYTES = 64 * 2**20  # in the object store


class WeightFile:
    """A file that one trainer writes weights to; readers map it after `write` and before the next one.

    It is in `directory` (None: shared memory; the temporary directory where there is none, or when it is full). It is
    locked as long as it is open, and removed by `close`; stale files of killed runs are removed here.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory()
        remove_stale_weight_files(self._directory)
        self._file, self.path = create_locked_file(self._directory)
        self._capacity = 0  # bytes
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the mapped file

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy each tensor into the file, on whatever device it is; raises WeightSyncError when there is no room."""
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
        """Allocate before mapping: writing to a mapped page for which there is no memory would kill the process."""
        try:
            os.posix_fallocate(self._file, 0, capacity)
        except OSError as error:
            fallback = Path(tempfile.gettempdir())
            if error.errno != errno.ENOSPC or self._directory == fallback:
                raise WeightSyncError(f"no room for {capacity / 2**20:.0f} MiB of weights in {self.path}") from error
            logger.warning("%s is full: weights go through %s, which is slower", self._directory, fallback)
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


def make_weight_entry(name: str, tensor: torch.Tensor, offset: int) -> WeightEntry:
    """Return the entry of a tensor that begins `offset` bytes after the start."""
    return WeightEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


def create_locked_file(directory: Path) -> tuple[int, Path]:
    """Create a file, locked before it has the name by which others look for stale files."""
    name = f"{PREFIX}{os.getpid()}_{secrets.token_hex(4)}{SUFFIX}"
    unlocked = directory / f".{name}"
    file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(unlocked, directory / name)
    return file, directory / name


_FILES: dict[str, WeightFile] = {}  # open in this process: a policy's, which may not be the driver's


@dataclass(frozen=True, slots=True)
class WriteWeightFile:
    """Writes the weight file `key` of the process that it is called in; the file stays open there. Picklable."""

    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        if self.key not in _FILES:
            _FILES[self.key] = WeightFile()
            atexit.register(close_weight_file, self.key)
        return _FILES[self.key].write(weights)


def close_weight_file(key: str) -> None:
    """Remove the file `key` of this process, if it has it."""
    if file := _FILES.pop(key, None):
        file.close()


class SharedMemory:
    """The transport `shared_memory`: a file that the policy rewrites at each refit and engines on its machine map."""

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


@dataclass(frozen=True, slots=True)
class PutWeights:
    """Puts the weights into the object store of the process that it is called in, chunk by chunk. Picklable."""

    name: str
    transfer: int
    chunk_bytes: int = CHUNK_BYTES

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightChunks:
        from nemo_rl.distributed.actors import put_bytes  # loads Ray, which a run in one process has no use for

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
