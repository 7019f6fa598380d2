"""The files of the index: their places in the cache directory, and the lock of the process that writes them."""

import atexit
import fcntl
import functools
import hashlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

_numbers = itertools.count()


def cache_directory() -> Path:
    """Return the directory of the cached indexes: that of the user, by the XDG rules."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo-rl" / "viewer"


def index_path(directory: Path, path: Path) -> Path:
    """Return the path of a file's index in a directory, without suffix."""
    return directory / hashlib.sha256(str(path.resolve()).encode(errors="replace")).hexdigest()[:32]


def private_index_path(path: Path) -> Path:
    """Return a temporary path for an index of this process. Raises OSError if there is no temporary directory."""
    return _private_directory() / f"{path.stem}-{next(_numbers)}"


def open_locked(path: Path) -> BinaryIO:
    """Open a file of records and lock it. Raises OSError if another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


@functools.cache
def _private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="nemo-rl-viewer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
