"""Files that appear whole or not at all."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` to write to, renamed to it once the block has ended and its bytes are on the disk.

    Folders above are made. An error leaves what was at `path`. Writers on several machines do not meet; the last one
    to end wins.
    """
    unfinished = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` survive a power failure; nothing where the file system cannot."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
