"""Ports that are told before anybody listens on them: none that the kernel hands to other connections meanwhile."""

import contextlib
import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of Linux: those of outgoing connections, and of port 0
FIRST = 20_000  # Ray's workers listen below


def unused_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports on which nobody listens at `host` now, by chance from 20,000 up to the kernel's own.

    Where the kernel's own begin below, they are of those. Raises OSError where there are not so many.
    """
    candidates = _outside_the_kernels()
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
    """One of `unused_ports`."""
    return unused_ports(1, host)[0]


def _outside_the_kernels() -> list[int]:
    try:
        end = int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        end = 32_768
    ports = list(range(FIRST, end))
    random.SystemRandom().shuffle(ports)  # not the run's random numbers
    return ports
