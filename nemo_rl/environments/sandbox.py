"""A sandbox for Python code that a model wrote: a process that can do nothing but compute.

On Linux (x86-64, ARM64), for any user and without privileges, the code

- makes only the system calls that computing and files need (seccomp): it starts, signals, schedules or traces no
  process or thread, opens no socket, and makes no special file, link or key;
- reads only its own directory and the Python installation, and writes only regular files in that directory (Landlock,
  5.13 and later, whose scopes, 6.12 and later, also hold signals and abstract sockets back; or a private mount
  namespace with nothing else in it);
- has no capability, and runs as a user of its own if the trainer is root;
- holds at most `HOME_BYTES` in files, in a memory file system of its own that goes with it (a private mount namespace);
  without one its directory is measured while it runs, and removed after it;
- ends after `cpu_s` seconds of CPU time or `wall_s` seconds (some more if it disables its own alarm), holds at most
  `memory_bytes` of address space, and writes at most `FILE_BYTES` to each file, its output included (resource limits);

and it sees no environment variable of the trainer. If bubblewrap is installed and usable, all this runs inside its
namespaces too. `isolation` tells which of these layers this machine has and what is not covered; on other systems than
Linux the limits hold, and a Python audit hook prevents accidents but does not stop a determined attacker. A directory
that cannot be removed is logged with its size, and tried again after the next call.
"""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.environments.sandbox_launcher import DEVICES, HOME_BYTES, HOME_FILES, READABLE

logger = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
WITHOUT_VARIABLE = "NEMO_RL_SANDBOX_WITHOUT"  # layers to do without, for tests: landlock,namespaces,bubblewrap
FILE_BYTES = 4 * 1024 * 1024
MEASURE_PERIOD_S = 0.2  # period of measuring a directory without a size limit of its own
REMOVAL_ATTEMPTS = 3
STARTUP_GRACE_S = 10.0  # time for the interpreter's start on a busy machine, in addition to `wall_s`
FIRST_USER_ID, NUM_USER_IDS = 61184, 4096  # the range of systemd's dynamic users
SCOPES_SINCE = 6  # the version of Landlock that knows signals and abstract sockets

_leftovers: set[str] = set()  # directories that could not be removed
_user_ids = itertools.cycle(range(FIRST_USER_ID, FIRST_USER_ID + NUM_USER_IDS))


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Resource limits of one call."""

    cpu_s: float = 2.0
    wall_s: float = 5.0
    memory_bytes: int = 512 * 1024 * 1024
    max_output_chars: int = 4096


@dataclass(frozen=True, slots=True)
class Isolation:
    """The layers of the sandbox on this machine."""

    filter: bool = False  # seccomp
    landlock: int = 0  # its version; 0: none
    view: bool = False  # a private file system with the Python installation alone
    user: int = -1  # user id of the code; -1: unknown
    bubblewrap: str | None = None  # its path

    @property
    def gaps(self) -> tuple[str, ...]:
        shut = self.view or self.bubblewrap is not None
        gaps = []
        if not shut:
            gaps.append(f"the total size of many files, but for a check every {MEASURE_PERIOD_S:g} s")
        elif not self.view:
            gaps.append("the number of files")
        if not self.filter:
            gaps.insert(0, "system calls: only Python's audit hook holds, which stops no attacker")
        if not self.landlock and not shut:
            gaps.insert(0, "files that the trainer's user can read or write (neither Landlock nor namespaces)")
        elif not shut:
            gaps.append("whether a file outside exists, and its size")
        if self.user == 0:
            gaps.append("the user: root without capabilities")
        return tuple(gaps)

    def __str__(self) -> str:
        scopes = " with signals and abstract sockets" if self.landlock >= SCOPES_SINCE else ""
        layers = {
            "bubblewrap": self.bubblewrap,
            "allow-list of system calls": self.filter,
            f"Landlock {self.landlock}{scopes}": self.landlock,
            "private file system": self.view,
            f"user {self.user} without capabilities": self.user >= 0,
            "resource limits": True,
        }
        uncovered = ", ".join(self.gaps) or "nothing known"
        return f"{', '.join(name for name, holds in layers.items() if holds)}; not covered: {uncovered}"


@functools.cache
def isolation() -> Isolation:
    """Return the layers that hold, by probing once, and log them; blocking."""
    found = Isolation()
    bubblewrap = shutil.which("bwrap")
    for tool in (bubblewrap, None) if bubblewrap and "bubblewrap" not in _without() else (None,):
        ended = _run("", SandboxLimits(), bubblewrap=tool, probe=True)
        text = ended.output.decode(errors="replace")
        if ended.status == 0:
            found = Isolation(**json.loads(text), bubblewrap=tool)
            break
        problem = text.strip().splitlines()[-1:] or [f"exit status {ended.status}"]
        logger.warning("sandbox: %s cannot be used: %s", tool or LAUNCHER.name, problem[0])
    is_open = not found.filter or not (found.landlock or found.view or found.bubblewrap)
    logger.log(logging.WARNING if is_open else logging.INFO, "sandbox: %s", found)
    return found


def run_python(code: str, limits: SandboxLimits) -> str:
    """Run the code, blocking, and return what it printed, with the value of a last expression as in a notebook.

    Errors of the code, their traceback and a limit that ended it are part of the text, which is truncated in the middle
    to `max_output_chars`. Each call is a fresh process in an empty directory.
    """
    found = isolation()
    is_bounded = found.view or found.bubblewrap is not None
    ended = _run(code, limits, bubblewrap=found.bubblewrap, measured=not is_bounded)
    text = truncate_middle(ended.output.decode(errors="replace").rstrip("\n"), limits.max_output_chars)
    return "\n".join(part for part in (text, _describe_end(ended, limits)) if part)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A process of the sandbox that has ended."""

    output: bytes
    status: int | None  # exit status, negative for a signal; None if it was killed at the deadline
    has_filled_home: bool = False  # and was killed for it


def _run(
    code: str, limits: SandboxLimits, *, bubblewrap: str | None, measured: bool = False, probe: bool = False
) -> _Ended:
    """Run the code in a directory of its own, which is measured while it runs if `measured`."""
    settings = launcher_settings(limits.memory_bytes) | {
        "cpu_s": math.ceil(limits.cpu_s),
        "wall_s": limits.wall_s,
        "without": [*_without(), *(["namespaces"] if bubblewrap else [])],
        "probe": probe,
    }
    with temporary_directory() as home, _output_file() as (output, reader):
        prefix = _bubblewrap_command(bubblewrap, home) if bubblewrap else []
        process = subprocess.Popen(
            [*prefix, sys.executable, "-I", str(LAUNCHER), repr(settings)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=home,
            env=minimal_environment(home),
            start_new_session=True,
        )
        deadline = time.monotonic() + limits.wall_s + STARTUP_GRACE_S
        has_ended = has_filled_home = False
        try:
            text: bytes | None = code.encode(errors="replace")
            while not (has_ended or has_filled_home) and (left_s := deadline - time.monotonic()) > 0:
                has_ended = _communicate(process, text, min(left_s, MEASURE_PERIOD_S) if measured else left_s)
                has_filled_home = measured and not has_ended and _is_full(home)
                text = None  # it continues
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        status = process.returncode if has_ended else None
        if bubblewrap and status is not None and status > 128:
            status = 128 - status
        return _Ended(os.pread(reader, FILE_BYTES, 0), status, has_filled_home)


def _communicate(process: subprocess.Popen[bytes], text: bytes | None, timeout_s: float) -> bool:
    """Send a process its input and wait for its end, at most `timeout_s`; return whether it has ended."""
    try:
        process.communicate(text, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextlib.contextmanager
def _output_file() -> Iterator[tuple[int, int]]:
    """Open an unnamed file twice, for the code to write to and for the trainer to read.

    The code may set flags on its own descriptor (O_DIRECT) that would make the trainer's reads fail.
    """
    writer, path = tempfile.mkstemp(prefix="sandbox-output-")
    try:
        reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.unlink(path)
        try:
            yield writer, reader
        finally:
            os.close(reader)
    finally:
        os.close(writer)


def _is_full(home: str) -> bool:
    """Return whether the files in a directory that code is using exceed the limits, or cannot be counted."""
    num_bytes = num_files = 0
    pending = [home]
    try:
        while pending:
            for entry in _scan(pending.pop()):
                with contextlib.suppress(FileNotFoundError):  # removed by the code
                    info = entry.stat(follow_symlinks=False)
                    num_bytes, num_files = num_bytes + info.st_blocks * 512, num_files + 1
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(entry.path)
                if num_bytes > HOME_BYTES or num_files > HOME_FILES:
                    return True
    except OSError:  # a directory that may not be read, or too deep a one
        return True
    return False


def _scan(directory: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        yield from entries


def launcher_settings(memory_bytes: int) -> dict[str, Any]:
    """Return the settings of the launcher that every process in the sandbox has: its limits, and its user if root."""
    return {
        "memory_bytes": memory_bytes,
        "file_bytes": FILE_BYTES,
        "user_id": next(_user_ids),
        "without": _without(),
    }


def minimal_environment(home: str) -> dict[str, str]:
    """Return the variables of a process in the sandbox: none of the trainer's."""
    return {"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _bubblewrap_command(bubblewrap: str, home: str) -> list[str]:
    """Return the command that runs another one in namespaces of its own, with the Python installation and `home`."""
    paths = sorted({*READABLE, *map(os.path.realpath, READABLE)})
    binds = [part for path in paths for part in ("--ro-bind-try", path, path)]
    devices = [part for path in DEVICES for part in ("--dev-bind-try", path, path)]
    user = ["--uid", str(FIRST_USER_ID), "--gid", str(FIRST_USER_ID)] if os.geteuid() == 0 else []
    namespaces = ["--unshare-all", "--unshare-user", *user, "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    launcher = ["--ro-bind", str(LAUNCHER), str(LAUNCHER)]
    own = ["--size", str(HOME_BYTES), "--tmpfs", home, "--chdir", home]
    return [bubblewrap, *namespaces, *binds, *launcher, *devices, *own, "--"]


def _without() -> list[str]:
    return [layer for layer in os.environ.get(WITHOUT_VARIABLE, "").split(",") if layer]


@contextlib.contextmanager
def temporary_directory() -> Iterator[str]:
    """Make a directory that is removed whatever the code left in it: names, depth and access modes do not matter.

    What cannot be removed is logged with its size, and tried again after the next call.
    """
    home = tempfile.mkdtemp(prefix="sandbox-")
    try:
        yield home
    finally:
        for path in (home, *_leftovers):
            _remove_or_log(path)


def _remove_or_log(path: str) -> None:
    """Remove a directory, or log that it stays and keep it for the next call."""
    problem: OSError | None = None
    for _ in range(REMOVAL_ATTEMPTS):
        try:
            _remove_tree(path)
        except OSError as error:
            problem = error
        if not os.path.lexists(path):
            _leftovers.discard(path)
            return
    if path not in _leftovers:
        logger.error("sandbox: cannot remove %s (%s): %s stay until the next try", path, problem, _describe_size(path))
    _leftovers.add(path)


def _describe_size(root: str) -> str:
    """Describe what a directory holds, as far as it can be read."""
    num_bytes = num_files = 0
    for parent, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                num_bytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
            num_files += 1
    return f"{num_bytes} bytes in {num_files} files"


def _remove_tree(root: str) -> None:
    """Remove a directory that no process uses any more, without recursion and without following links.

    It goes down and up with one descriptor, and makes no name that the code could have taken.
    """
    os.chmod(root, 0o700)
    current = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        pending = [_remove_files(current)]  # by level, the directories that are left; the last one has been entered
        while pending[0] or len(pending) > 1:
            if pending[-1]:
                name = pending[-1][-1]
                os.chmod(name, 0o700, dir_fd=current)
                current = _move(current, name)
                pending.append(_remove_files(current))
            else:
                pending.pop()
                current = _move(current, "..")
                os.rmdir(pending[-1].pop(), dir_fd=current)
    finally:
        os.close(current)
    os.rmdir(root)


def _move(directory: int, name: str) -> int:
    """Return a descriptor of a directory beside an open one, which is closed."""
    found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    os.close(directory)
    return found


def _remove_files(directory: int) -> list[str]:
    """Remove what is no directory, and return the names of the directories."""
    directories = []
    for name in os.listdir(directory):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            directories.append(name)
        else:
            os.unlink(name, dir_fd=directory)
    return directories


def _describe_end(ended: _Ended, limits: SandboxLimits) -> str:
    """Name the limit or signal that ended the code; "" if it ended by itself."""
    status = ended.status
    if len(ended.output) == FILE_BYTES:
        return "[stopped: too much output]"
    if ended.has_filled_home:
        return f"[stopped: more than {HOME_BYTES} bytes or {HOME_FILES} files]"
    if status in (None, -signal.SIGALRM):
        return f"[stopped: longer than {limits.wall_s:g} s]"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"[stopped: more than {limits.cpu_s:g} s of computing]"
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):  # a number without a name
            return f"[stopped: {signal.Signals(-status).name}]"
    return ""


def truncate_middle(text: str, max_chars: int) -> str:
    """Return the text, or its first and last characters and how many between them were omitted."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"
