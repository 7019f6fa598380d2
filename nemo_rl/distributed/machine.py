"""This machine: cache directory, memory nodes, open files, OpenMP threads, private files, interfaces and ports."""

import contextlib
import ctypes
import logging
import os
import random
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

RESERVED_FILES = 256  # open files of the engine, datasets, checkpoints and logs of the same process
FILES_PER_CONNECTION = 2  # both ends, since an agent may live in this process too
UNLIMITED = 2**20  # requested if there is no hard limit: kernels have one of their own
OMP_PAUSE_HARD = 2  # OpenMP 5.0: release the threads and all state
LOOPBACK_INTERFACE = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
EPHEMERAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux's ports for outgoing connections
FAR_ADDRESS = ("192.0.2.1", 53)  # belongs to no machine (RFC 5737); the route to it is the default one
FIRST = 20_000  # the lowest port that is handed out: Ray's workers listen below

_LIBRARIES = ctypes.CDLL(None)  # all libraries of this process; OpenMP's runtime comes with torch


def cache_directory() -> Path:
    """Return the directory of cached models and environments: NEMO_RL_CACHE, else ~/.cache/nemo_rl."""
    return Path(os.environ.get("NEMO_RL_CACHE", Path.home() / ".cache" / "nemo_rl"))


def num_memory_nodes() -> int:
    """Return the number of NUMA nodes of this machine; 0 if the kernel does not report them."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IP address; None if this machine does not have it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def outward_address() -> str:
    """Return this machine's address on the way to other networks, else that of its host name. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(FAR_ADDRESS)
        except OSError:  # no route
            return socket.gethostbyname(socket.gethostname())
        return probe.getsockname()[0]


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one if allowed; return the limit in force."""
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


def files_for_connections(count: int) -> int:
    """Return the limit of open files under which `max_connections` is `count`."""
    return RESERVED_FILES + count * FILES_PER_CONNECTION


def _finite(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def release_openmp_threads() -> None:
    """Release the OpenMP threads of the calling thread; its next parallel work makes new ones.

    Each computing thread keeps a team of its own. Once all teams together have more threads than the machine has cores,
    GNU's OpenMP puts a team to sleep between two parallel regions instead of letting it spin, which takes longer than
    the regions of a small model (docs/benchmarks.md). So a thread that takes turns with others calls this before it
    waits. Does nothing if the runtime lacks `omp_pause_resource_all`.
    """
    if (pause := getattr(_LIBRARIES, "omp_pause_resource_all", None)) is not None:
        pause(OMP_PAUSE_HARD)


def compute_in_turn(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """Return the function's result; release the OpenMP threads of the calling thread, also if it raises."""
    try:
        return function(*args)
    finally:
        release_openmp_threads()


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: a configuration or a secret."""
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)


def unused_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """Return random distinct free ports at `host`, between 20,000 and the kernel's ephemeral range.

    If that range begins below 20,000, the ports are in it. Raises OSError if there are not enough.
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
    return unused_ports(1, host)[0]


def listen_on(host: str, port: int = 0) -> tuple[int, int]:
    """Return the descriptor of a socket that listens at `host` alone, and its port; 0: a free one.

    torch's TCPStore, which checks no token, would listen on all addresses of the machine; it takes over the descriptor.
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
    random.SystemRandom().shuffle(ports)  # leaves the run's random state alone
    return ports
