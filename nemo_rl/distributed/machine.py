"""This machine: cache directory, open-file limit, OpenMP's threads, free ports, weight files, and processes that end
with the trainer."""

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import random
import resource
import select
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


def cache_directory() -> Path:
    """Return the directory of cached models and environments: NEMO_RL_CACHE, else ~/.cache/nemo_rl."""
    return Path(os.environ.get("NEMO_RL_CACHE", Path.home() / ".cache" / "nemo_rl"))


RESERVED_FILES = 256  # for the engine, datasets, checkpoints and logs of the same process
FILES_PER_CONNECTION = 2  # an agent may live in this process too, and hold the other end
UNLIMITED = 2**20  # requested where there is no hard limit: kernels have one of their own


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one where that is allowed; return the limit in force."""
    soft, hard = (_finite(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft >= hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (ValueError, OSError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    logger.info("raised the limit of open files from %d to %d", soft, hard)
    return hard


def max_connections(file_limit: int) -> int:
    """Return how many connections may be open at once under a limit of open files; at least 1.

    Example: 1024 open files carry 384 connections.
    """
    return max(1, (file_limit - RESERVED_FILES) // FILES_PER_CONNECTION)


def _finite(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


OMP_PAUSE_HARD = 2  # of OpenMP 5.0: give up the threads, and keep no state


def release_openmp_threads() -> None:
    """Give up the OpenMP threads that the calling thread has computed with; its next parallel work makes new ones.

    Each thread that computes keeps a team of its own. Once all teams together have more threads than the machine has
    cores, GNU's OpenMP no longer lets a team's threads spin between two parallel regions but puts them to sleep, which
    takes longer than the regions of a small model (docs/benchmarks.md). So a thread that computes in turn with others
    calls this before it waits. Does nothing with a runtime that lacks `omp_pause_resource_all`.
    """
    if (pause := getattr(_LIBRARIES, "omp_pause_resource_all", None)) is not None:
        pause(OMP_PAUSE_HARD)


def compute_in_turn(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """Return the function's result, and release the OpenMP threads of the calling thread, also where it raises."""
    try:
        return function(*args)
    finally:
        release_openmp_threads()


_LIBRARIES = ctypes.CDLL(None)  # all that this process has loaded: the runtime comes with torch


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: a configuration, or a secret."""
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)


LOOPBACK_INTERFACE = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)

# Linux's ports of outgoing connections, and of port 0.
EPHEMERAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 20_000  # Ray's workers listen below


def unused_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """Return random distinct free ports at `host`, between 20,000 and the kernel's ephemeral range.

    Where that range begins below 20,000, the ports are in it. Raises OSError where there are not enough.
    """
    candidates = _candidate_ports()
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < number:
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind((host, candidates.pop() if candidates else 0))
            except OSError:
                if not candidates:
                    raise
            else:
                ports.append(probe.getsockname()[1])
    return ports


def unused_port(host: str = "127.0.0.1") -> int:
    """Return one of `unused_ports`."""
    return unused_ports(1, host)[0]


def listen_on(host: str, port: int = 0) -> tuple[int, int]:
    """Return the descriptor of a socket that listens at `host` alone, and its port; 0: a free one.

    torch's TCPStore, which checks no token, would listen on all addresses of the machine; it takes the descriptor over.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        port = listener.getsockname()[1]
        return listener.detach(), port


def _candidate_ports() -> list[int]:
    try:
        end = int(EPHEMERAL_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32_768
    ports = list(range(FIRST, end))
    random.SystemRandom().shuffle(ports)  # not the run's random numbers
    return ports


SHARED_MEMORY = Path("/dev/shm")
PREFIX, SUFFIX = "nemo_rl_weights_", ".bin"


def default_directory() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def remove_stale_weight_files(directory: Path) -> None:
    """Remove weight files without a lock: their runs were killed.

    A lock rather than the process id in the name: containers that share memory do not share process ids.
    """
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            logger.info("removed the stale weight file %s of a killed run", path)
        except OSError:  # locked: in use
            pass
        finally:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Activity:
    """The work of some processes so far; two of them tell whether they do anything."""

    cpu_ticks: int  # CPU time of all their threads
    num_stopped: int  # processes in the state of a SIGSTOP


def read_activity(pids: Collection[int]) -> Activity | None:
    """Return the activity of processes of this machine; those that have ended count nothing. Source: proc(5).

    None: none of them can be read, since all have ended or this machine hides /proc.
    """
    found = [fields for pid in pids if (fields := _read_status(pid))]
    if not found:
        return None
    cpu_ticks = sum(int(fields[11]) + int(fields[12]) for fields in found)
    return Activity(cpu_ticks, num_stopped=sum(fields[0] == "T" for fields in found))


POLL_PERIOD_S = 1.0  # between two polls of processes


async def wait_until_idle(pids: Collection[int], limit_s: float, *, may_wait: bool = False) -> None:
    """Return once the processes have done nothing for `limit_s`; never without processes that can be read at first.

    Idle are processes that use no CPU time, or, where they may wait for others, that are stopped. Only the time that
    this process has looked on counts: a machine that stands still makes nothing idle.
    """
    period, idle_s, before = min(POLL_PERIOD_S, limit_s / 4), 0.0, read_activity(pids)
    if before is None:
        await asyncio.Event().wait()
    while idle_s < limit_s:
        await asyncio.sleep(period)
        now = read_activity(pids)
        is_idle = (now is not None and now.num_stopped > 0) or (now == before and not may_wait)
        idle_s, before = (idle_s + period if is_idle else 0.0), now


def kill_children(pids: Collection[int]) -> None:
    """Kill those processes that this one, or another of them, has started.

    An id may have been reused by another process.
    """
    parents = {os.getpid(), *pids}
    for pid in pids:
        if (fields := _read_status(pid)) and int(fields[1]) in parents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _read_status(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; none of a process that does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # after the name in brackets
    except OSError:
        return []


def end_with(trainer: int) -> None:
    """Kill this process, and its parent where that is not the trainer, as soon as the trainer has ended."""
    core = os.getppid()
    try:
        handle = os.pidfd_open(trainer)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # a kernel without it: the death of the parent is all that is noticed
        return

    def wait() -> None:
        select.select([handle], [], [])
        if core != trainer and os.getppid() == core:
            os.kill(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-trainer", daemon=True).start()
