"""The engine's half of weights in host memory: tensors read in place. The trainer's half: weight_sync/refit.py."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from nemo_rl.distributed.actors import get_bytes
from nemo_rl.distributed.machine import default_directory, remove_stale_weight_files
from nemo_rl.errors import WeightSyncError
from nemo_rl.interfaces import LocalWeights, WeightChunks, WeightEntry, WeightManifest, Weights


def map_weights(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights without a copy, from a file or from this process: to be copied, and not to be written to.

    Raises WeightSyncError for weights elsewhere.
    """
    if isinstance(weights, LocalWeights):
        yield from weights.tensors
        return
    if not isinstance(weights, WeightManifest):
        raise WeightSyncError(f"weights are read from a file or from this process, not as {type(weights).__name__}")
    with open(weights.path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for entry in weights.entries:
        yield entry.name, view_entry(content, entry)


def view_entry(content: mmap.mmap, entry: WeightEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    count = 1
    for size in entry.shape:
        count *= size
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)


FETCH_S = 600.0  # for one chunk to come from another machine
ATTEMPTS = 5  # to write a file that another run removes before it is locked
TRAILER_BYTES = 8  # after the weights: the number of the refit that wrote them

_HELD: dict[Path, int] = {}  # files that this process reads; the lock keeps others from removing them


def write_node_file(weights: WeightChunks) -> WeightManifest:
    """Write `weights` into the file of this node, once; raises WeightSyncError, WorkerError where a chunk is missing.

    The file is locked while it is written, and shared afterwards until this process writes it again or releases it.
    Files of killed runs are removed before the first one.
    """
    path = default_directory() / weights.name
    if not _HELD:
        remove_stale_weight_files(path.parent)
    for _ in range(ATTEMPTS):
        file = open_or_create(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not contains_weights(file, weights):
                write(file, weights)
        except OSError as error:
            raise WeightSyncError(f"{path}: the weights could not be written: {error}") from error
        finally:
            fcntl.flock(file, fcntl.LOCK_SH)
        if is_linked_at(file, path):
            return WeightManifest(str(path), weights.entries)
    raise WeightSyncError(f"{path} is removed again and again by another run")


def open_or_create(path: Path) -> int:
    """Return the open file at `path`; one that was removed meanwhile is created again."""
    if (held := _HELD.pop(path, None)) is not None:
        if is_linked_at(held, path):
            _HELD[path] = held
            return held
        os.close(held)
    _HELD[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return _HELD[path]


def is_linked_at(file: int, path: Path) -> bool:
    """Return whether the file still has its name: another run may remove it in a moment without a lock."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def contains_weights(file: int, weights: WeightChunks) -> bool:
    size = os.fstat(file).st_size
    trailer = os.pread(file, TRAILER_BYTES, size - TRAILER_BYTES) if size >= TRAILER_BYTES else b""
    return trailer == weights.transfer.to_bytes(TRAILER_BYTES)


def write(file: int, weights: WeightChunks) -> None:
    os.ftruncate(file, 0)
    offset = 0
    for reference in weights.chunks:
        content = get_bytes(reference, FETCH_S).data
        while content:
            written = os.pwrite(file, content, offset)
            content, offset = content[written:], offset + written
    os.pwrite(file, weights.transfer.to_bytes(TRAILER_BYTES), offset)


def release(name: str | None = None) -> None:
    """Close the files that this process reads, and remove those that no other reads."""
    for path in [path for path in _HELD if name in (None, path.name)]:
        file = _HELD.pop(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # the last one removes it
            pass
        finally:
            os.close(file)
