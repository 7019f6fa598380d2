"""Files of a collection: append-only JSON Lines that survive a kill, and files written atomically."""

import contextlib
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from nemo_rl.durable_files import append_whole, close, close_after_fork, try_lock
from nemo_rl.errors import ConfigError, DataError, RolloutError

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
# Lines that RolloutStore wrote begin with their key; other lines are parsed whole.
_KEY = re.compile(rb'\{"task_index": ?(\d+), ?"rollout_index": ?(\d+), ?"seed": ?(\d+)[,}]')


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file next to `path`, renamed to it once the block has ended and its bytes are on the disk.

    Creates missing directories. An error leaves the old file at `path`. Writers on several machines do not collide;
    the last one to end wins.
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
    """Make the names in `directory` survive a power failure; do nothing if the file system cannot."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One row of a file: its key and its position."""

    task_index: int
    rollout_index: int
    seed: int
    offset: int
    length: int  # bytes, the newline included


class AppendOnlyFile:
    """A file that one process at a time appends whole lines to.

    `append` hands the line to the operating system before it returns: a killed process loses nothing of it; a power
    failure loses what is newer than the last `sync`. A line cut by a kill is removed when the file is next opened.
    """

    def __init__(self, path: Path) -> None:
        """Open or create. Raises ConfigError while another process has it open, DataError when it cannot be."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            if not try_lock(self._descriptor, path):
                raise ConfigError("output_dir", str(path.parent), f"{path.name} is being written to")
            self._truncate_torn_line()
        except BaseException:
            os.close(self._descriptor)
            raise
        close_after_fork(self._descriptor)

    def append(self, line: bytes) -> None:
        """Add `line`, which ends with a newline.

        Raises RolloutError, and leaves the file as it was, if the line cannot be written whole.
        """
        try:
            append_whole(self._descriptor, line)
        except OSError as error:
            raise RolloutError(f"{self.path}: cannot be written: {error.strerror}") from error

    def sync(self) -> None:
        """Return when everything appended before is on the disk; RolloutError. May be called from another thread."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise RolloutError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Release the lock; no call may follow."""
        close(self._descriptor)

    def _truncate_torn_line(self) -> None:
        size = end = os.fstat(self._descriptor).st_size
        while end:
            start = max(0, end - BLOCK_BYTES)
            last = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if last >= 0:
                end = start + last + 1
                break
            end = start
        if end < size:
            logger.warning("%s: removed %d bytes of an incomplete last line", self.path, size - end)
            os.ftruncate(self._descriptor, end)


def read_lines(path: Path) -> Iterator[RolloutLine]:
    """Yield the key and position of each line in order, except for an incomplete last line.

    Raises DataError naming file:line for one without a key.
    """
    try:
        with path.open("rb", buffering=BLOCK_BYTES) as file:
            yield from _read(file, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read(file: BinaryIO, path: Path) -> Iterator[RolloutLine]:
    offset = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        match = _KEY.match(line)
        if match is not None and line.endswith(b"}\n"):
            task, rollout, seed = map(int, match.groups())
        else:
            task, rollout, seed = _parse_key(line, f"{path}:{number}")
        yield RolloutLine(task, rollout, seed, offset, len(line))
        offset += len(line)


def _parse_key(line: bytes, location: str) -> tuple[int, int, int]:
    try:
        row = json.loads(line)
        key = tuple(row[name] for name in ("task_index", "rollout_index", "seed"))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{location}: no rollout with task_index, rollout_index and seed: {error}") from error
    if not all(isinstance(part, int) and part >= 0 for part in key):
        raise DataError(f"{location}: task_index, rollout_index and seed must be whole numbers, not {key}")
    return key
