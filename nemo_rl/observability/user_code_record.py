"""User code in flight, in a small mapped file that outlives the process.

`os._exit` or a crash in a reward function ends a run without a word; the supervisor and the next start name the
function from this file, which costs some microseconds whenever the set of functions in flight changes.
"""

import functools
import mmap
import threading
from dataclasses import dataclass
from pathlib import Path

FILE = "user_code.txt"  # in the directory of the checkpoints
SIZE = 4096  # bytes; longer lists are cut


@dataclass(frozen=True, slots=True)
class UserCodeSeen:
    """User code that a process ran before its end."""

    in_flight: str = ""  # functions that had not returned, joined by commas; empty after a clean end
    last: str = ""  # the function that was called last


class UserCodeRecord:
    """The functions in flight of this process. Thread-safe; without a file it only counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._last = ""
        self._map: mmap.mmap | None = None

    def open(self, directory: Path) -> UserCodeSeen:
        """Write to the file in `directory` from now on; return what an earlier process left there."""
        path = directory / FILE
        seen = read(path)
        with self._lock:
            path.write_bytes(bytes(SIZE))
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), SIZE)
            self._write()
        return seen

    def close(self) -> None:
        """Leave the file without functions in flight: the run has ended in order."""
        with self._lock:
            self._counts = {}
            self._write()
            self._map = None

    def begin(self, name: str) -> None:
        with self._lock:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            if count == 0 or name != self._last:
                self._last = name
                self._write()

    def end(self, name: str) -> None:
        """Note that a function that began has ended."""
        with self._lock:
            count = self._counts.get(name, 1) - 1
            if count > 0:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)
                self._write()

    def _write(self) -> None:
        if self._map is not None:
            content = _encode((*self._counts, self._last))
            self._map[: len(content)] = content


@functools.lru_cache(maxsize=1024)  # the same few functions begin and end all the time
def _encode(names: tuple[str, ...]) -> bytes:
    """Return the content of the file: the functions in flight, and the one that was called last."""
    *in_flight, last = names
    return f"{', '.join(in_flight)}\n{last}\n".encode(errors="replace")[: SIZE - 1] + b"\0"


def read(path: Path) -> UserCodeSeen:
    """Return the record that a process wrote; empty if there is no such file."""
    try:
        lines = path.read_bytes().split(b"\0")[0].decode(errors="replace").split("\n")
    except OSError:
        return UserCodeSeen()
    return UserCodeSeen(*lines[:2])


USER_CODE = UserCodeRecord()
