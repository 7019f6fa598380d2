"""Files that outlive a run: written by one process at a time, and complete or absent after a kill."""

import contextlib
import fcntl
import functools
import json
import logging
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
LOCK_WAIT_S = 5.0  # time for a holder that is about to end
POLL_S = 0.1

_open_descriptors: set[int] = set()  # those that `close_after_fork` closes


@contextlib.contextmanager
def hold_directory(
    directory: Path, *, key: str, wait_s: float | None = None, is_replaced: bool = False
) -> Iterator[None]:
    """Keep other processes from writing to a directory, which is made if necessary, until the block ends.

    The lock goes with this process, however it ends, and holds on other machines if the file system has locks there.
    It stands beside a directory that is written by replacing it. Raises ConfigError for `key` that names the holder if
    another process, or another block of this one, has it.
    """
    path = directory.with_name(f".{directory.name}{LOCK_FILE}") if is_replaced else directory / LOCK_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(key, str(directory), f"{path} cannot be opened: {error.strerror}") from error
    close_after_fork(descriptor)
    try:
        deadline = time.monotonic() + (LOCK_WAIT_S if wait_s is None else wait_s)
        while not try_lock(descriptor, path):
            if time.monotonic() > deadline:
                raise ConfigError(key, str(directory), _describe_holder(path))
            time.sleep(POLL_S)
        _write_holder(descriptor)
        yield
    finally:
        close(descriptor)


@contextlib.contextmanager
def complete_or_absent(directory: Path) -> Iterator[Path]:
    """Yield a new directory beside `directory` that gets its name after the block; an error removes it."""
    draft = directory.parent / f".{directory.name}.{os.getpid()}.tmp"
    draft.mkdir(parents=True)
    try:
        yield draft
        os.rename(draft, directory)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def try_lock(descriptor: int, path: Path) -> bool:
    """Lock an open file; return whether no other process has it. True, with a warning, without locks on its system."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("cannot lock %s (%s): make sure that only one job writes it", path, error.strerror)
    return True


def is_held(directory: Path) -> bool | None:
    """Return whether a process has a directory of `hold_directory` now; None if its lock cannot be tried."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def replace_text(path: Path, text: str) -> None:
    """Write a file that readers find complete, old or new; raises OSError, and leaves the old one, if it cannot."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def append_whole(descriptor: int, data: bytes) -> None:
    """Append data to a file that was opened to append; raises OSError, and leaves the file as it was, if it cannot."""
    size = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
        while written < len(data):  # a full disk takes a part, then raises
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def close_after_fork(descriptor: int) -> None:
    """Close a descriptor in every fork of this process, until `close`.

    A fork shares its parent's locks: an engine that outlives a killed run would keep the next one out.
    """
    _register_at_fork()
    _open_descriptors.add(descriptor)


def close(descriptor: int) -> None:
    """Close a descriptor of `close_after_fork`, unless a fork has closed it."""
    if descriptor in _open_descriptors:
        _open_descriptors.remove(descriptor)
        os.close(descriptor)


@functools.cache
def _register_at_fork() -> None:
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    while _open_descriptors:
        os.close(_open_descriptors.pop())


def _write_holder(descriptor: int) -> None:
    """Write who holds the lock, for the error of others; a full disk does not matter."""
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(sys.argv)[:1000],
    }
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _describe_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes())
        who = f"process {holder['pid']} on {holder['host']} since {holder['since']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError):  # it begins, or its disk was full
        who = "another process"
    return f"in use by {who}; wait until it ends, end it, or choose another directory"
