"""A sandbox for Python code that a model wrote: a process that can do nothing but compute.

On Linux (x86-64, ARM64), for any user and without privileges, the code

- makes only the system calls that computing and files need (seccomp): it starts, signals, schedules or traces no
  process or thread, opens no socket, and makes no special file, link or key;
- reads only its own directory and the Python installation, and writes only regular files in that directory (Landlock,
  5.13 and later, whose scopes, 6.12 and later, also hold signals and abstract sockets back; or a private mount
  namespace with nothing else in it);
- has no capability, and runs as a user of its own where the trainer is root;
- ends after `cpu_s` seconds of CPU time or `wall_s` seconds (some more if it disables its own alarm), holds at most
  `memory_bytes` of address space, and writes at most `FILE_BYTES` to each file, its output included (resource limits);

and it sees no environment variable of the trainer. Where bubblewrap is installed and usable, all this runs inside its
namespaces too. `isolation` tells which of these layers this machine has and what is not covered; on other systems than
Linux the limits hold, and a Python audit hook prevents accidents but does not stop a determined attacker.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.environments.sandbox_launcher import DEVICES, READABLE

logger = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
WITHOUT_VARIABLE = "NEMO_RL_SANDBOX_WITHOUT"  # layers to do without, for tests: landlock,namespaces,bubblewrap
FILE_BYTES = 4 * 1024 * 1024
STARTUP_GRACE_S = 10.0  # for the interpreter's start on a busy machine, in addition to `wall_s`
FIRST_USER_ID, NUM_USER_IDS = 61184, 4096  # what systemd gives to services without a user of their own
SCOPES_SINCE = 6  # the version of Landlock that knows signals and abstract sockets

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
    user: int = -1  # of the code; -1: unknown
    bubblewrap: str | None = None  # its path

    @property
    def gaps(self) -> tuple[str, ...]:
        """Return what is not covered."""
        shut = self.view or self.bubblewrap is not None
        gaps = ["the total size of many files"]
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
        return f"{', '.join(name for name, holds in layers.items() if holds)}; not covered: {', '.join(self.gaps)}"


@functools.cache
def isolation() -> Isolation:
    """Return the layers that hold, by probing once, and log them; blocking."""
    found = Isolation()
    bubblewrap = shutil.which("bwrap")
    for tool in (bubblewrap, None) if bubblewrap and "bubblewrap" not in _without() else (None,):
        with temporary_directory() as home, tempfile.TemporaryFile() as output:
            status = _run("", SandboxLimits(), home, output.fileno(), bubblewrap=tool, probe=True)
            output.seek(0)
            text = output.read().decode(errors="replace")
        if status == 0:
            found = Isolation(**json.loads(text), bubblewrap=tool)
            break
        problem = text.strip().splitlines()[-1:] or [f"exit status {status}"]
        logger.warning("sandbox: %s cannot be used: %s", tool or LAUNCHER.name, problem[0])
    is_open = not found.filter or not (found.landlock or found.view or found.bubblewrap)
    logger.log(logging.WARNING if is_open else logging.INFO, "sandbox: %s", found)
    return found


def run_python(code: str, limits: SandboxLimits) -> str:
    """Run the code, blocking, and return what it printed, with the value of a last expression as in a notebook.

    Errors of the code, their traceback and a limit that ended it are part of the text, which is truncated in the middle
    to `max_output_chars`. Each call is a fresh process in an empty directory.
    """
    bubblewrap = isolation().bubblewrap
    with temporary_directory() as home, tempfile.TemporaryFile() as output:
        status = _run(code, limits, home, output.fileno(), bubblewrap=bubblewrap)
        output.seek(0)
        raw = output.read(FILE_BYTES)
    text = truncate_middle(raw.decode(errors="replace").rstrip("\n"), limits.max_output_chars)
    problem = "[stopped: too much output]" if len(raw) == FILE_BYTES else _describe_termination(status, limits)
    return "\n".join(part for part in (text, problem) if part)


def _run(
    code: str, limits: SandboxLimits, home: str, output: int, *, bubblewrap: str | None, probe: bool = False
) -> int | None:
    """Return the exit status, negative for a signal; None after the deadline."""
    settings = {
        "cpu_s": math.ceil(limits.cpu_s),
        "wall_s": limits.wall_s,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": FILE_BYTES,
        "user_id": next(_user_ids),
        "without": [*_without(), *(["namespaces"] if bubblewrap else [])],
        "probe": probe,
    }
    prefix = _bubblewrap_command(bubblewrap, home) if bubblewrap else []
    process = subprocess.Popen(
        [*prefix, sys.executable, "-I", str(LAUNCHER), repr(settings)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        cwd=home,
        env={"HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        process.communicate(code.encode(errors="replace"), timeout=limits.wall_s + STARTUP_GRACE_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return 128 - process.returncode if bubblewrap and process.returncode > 128 else process.returncode


def _bubblewrap_command(bubblewrap: str, home: str) -> list[str]:
    """Return the command that runs another one in namespaces of its own, with the Python installation and `home`."""
    paths = sorted({*READABLE, *map(os.path.realpath, READABLE)})
    binds = [part for path in paths for part in ("--ro-bind-try", path, path)]
    devices = [part for path in DEVICES for part in ("--dev-bind-try", path, path)]
    user = ["--uid", str(FIRST_USER_ID), "--gid", str(FIRST_USER_ID)] if os.geteuid() == 0 else []
    namespaces = ["--unshare-all", "--unshare-user", *user, "--cap-drop", "ALL", "--die-with-parent", "--new-session"]
    launcher = ["--ro-bind", str(LAUNCHER), str(LAUNCHER)]
    return [bubblewrap, *namespaces, *binds, *launcher, *devices, "--bind", home, home, "--chdir", home, "--"]


def _without() -> list[str]:
    return [layer for layer in os.environ.get(WITHOUT_VARIABLE, "").split(",") if layer]


@contextlib.contextmanager
def temporary_directory() -> Iterator[str]:
    """Make a directory that is removed whatever the code left in it: depth and access modes do not matter."""
    home = tempfile.mkdtemp(prefix="sandbox-")
    try:
        yield home
    finally:
        with contextlib.suppress(OSError):
            _remove_tree(home)


def _remove_tree(root: str) -> None:
    """Remove a directory that no process uses any more, without recursion and without following links.

    A directory in a directory is first moved up into `root`, so that no path is longer than two names.
    """
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        numbers = itertools.count()
        pending = _remove_files(top)
        while pending:
            name = pending.pop()
            os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for child in _remove_files(inner):
                    os.chmod(child, 0o700, dir_fd=inner)
                    moved = f"{os.path.basename(root)}-{next(numbers)}"
                    os.rename(child, moved, src_dir_fd=inner, dst_dir_fd=top)
                    pending.append(moved)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(root)


def _remove_files(directory: int) -> list[str]:
    """Remove what is no directory, and return the names of the directories."""
    directories = []
    for name in os.listdir(directory):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            directories.append(name)
        else:
            os.unlink(name, dir_fd=directory)
    return directories


def _describe_termination(status: int | None, limits: SandboxLimits) -> str:
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
