"""A file per machine for weights from the object store: one engine writes it, all engines of the machine map it."""

import fcntl
import os
from pathlib import Path

from nemo_rl.distributed.actors import get_bytes
from nemo_rl.distributed.weight_files import default_directory, remove_stale_weight_files
from nemo_rl.errors import WeightSyncError
from nemo_rl.weight_manifests import WeightChunks, WeightManifest

FETCH_S = 600.0  # limit per chunk from another machine
ATTEMPTS = 5  # another run may remove the file before it is locked
TRAILER_BYTES = 8  # number of the refit, stored after its weights

_HELD: dict[Path, int] = {}  # files that this process reads, by a lock that keeps others from removing them


def write_node_file(weights: WeightChunks) -> WeightManifest:
    """Write `weights` into the file of this node, once; raises WeightSyncError, or WorkerError if a chunk is missing.

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
    """Return the open file at `path`; create it again if another run has removed it."""
    if (held := _HELD.pop(path, None)) is not None:
        if is_linked_at(held, path):
            _HELD[path] = held
            return held
        os.close(held)
    _HELD[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return _HELD[path]


def is_linked_at(file: int, path: Path) -> bool:
    """Return whether the file still has its name; another run may remove it while it is not locked."""
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
    """Close the files that this process reads, and remove those that no other process reads."""
    for path in [path for path in _HELD if name in (None, path.name)]:
        file = _HELD.pop(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # the last reader removes it
            pass
        finally:
            os.close(file)
