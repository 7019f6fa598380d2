import random
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.distributed import machine as ports
from nemo_rl.distributed.machine import (
    LOOPBACK_INTERFACE,
    files_for_connections,
    interface_of,
    max_connections,
    raise_file_limit,
    unused_port,
    unused_ports,
)

LOWER_THEN_RAISE = """
import resource
from nemo_rl.distributed.machine import raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
print(raise_file_limit() > 100, resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100)
"""


def test_the_soft_limit_is_raised_to_the_hard_one():
    done = subprocess.run([sys.executable, "-c", LOWER_THEN_RAISE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize(("limits", "wanted"), [((100, 500), 500), ((100, resource.RLIM_INFINITY), 2**20)])
def test_a_limit_that_may_not_be_raised_stays(monkeypatch, caplog, limits, wanted):
    asked = []

    def refuse(kind: int, pair: tuple[int, int]) -> None:
        asked.append(pair)
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit() == 100
    assert asked == [(wanted, limits[1])]
    assert "stays at 100: not allowed" in caplog.text


def test_a_limit_at_its_end_is_left_alone(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (500, 500))
    monkeypatch.setattr(resource, "setrlimit", None)
    assert raise_file_limit() == 500


def test_a_connection_takes_two_files_and_some_are_kept_for_others():
    assert [max_connections(limit) for limit in (1024, 258, 100, 0)] == [384, 1, 1, 1]
    assert [max_connections(files_for_connections(count)) for count in (1, 384)] == [1, 384]


def kernels(monkeypatch: pytest.MonkeyPatch, directory: Path, text: str) -> None:
    (directory / "range").write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL_PORT_RANGE", directory / "range")


def test_ports_differ_and_are_none_of_the_kernels_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels(monkeypatch, tmp_path, "20050\t60999\n")
    state = random.getstate()
    found = unused_ports(10)
    assert len(set(found)) == 10
    assert all(20_000 <= port < 20_050 for port in found)
    assert random.getstate() == state


def test_a_port_that_somebody_has_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels(monkeypatch, tmp_path, "60000 60999")
    taken, other = unused_ports(2)
    monkeypatch.setattr(ports, "_candidate_ports", lambda: [other, taken])  # the last is tried first
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        assert unused_port() == other


@pytest.mark.parametrize("text", ["1024 65535", "none"])
def test_where_the_kernels_begin_below_or_are_unknown_there_is_a_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    kernels(monkeypatch, tmp_path, text)
    assert unused_port() > 1023


COMPUTE_AND_RELEASE = """
import os, threading, time
import torch
from nemo_rl.distributed.machine import release_openmp_threads

def count():
    return len(os.listdir("/proc/self/task"))

def wait_for(number):
    deadline = time.monotonic() + 30
    while count() > number and time.monotonic() < deadline:
        time.sleep(0.01)
    return count()

torch.set_num_threads(2)
number = torch.get_num_threads()
release_openmp_threads()  # before any work: there is nothing to give up
before = count()
values = torch.ones(1 << 20)
values.mul_(3)
during = count()
release_openmp_threads()
assert torch.get_num_threads() == number == 2
after = wait_for(before)
again = values.sum().item()
print(before, during, after, again)
"""


def test_openmp_threads_are_given_up_and_made_again_at_the_next_work() -> None:
    done = subprocess.run([sys.executable, "-c", COMPUTE_AND_RELEASE], capture_output=True, text=True, check=True)
    before, during, after, again = map(float, done.stdout.split())
    assert during == before + 1  # the team of two has one thread beside its own
    assert after == before
    assert again == 3 * 2**20


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == LOOPBACK_INTERFACE
    assert interface_of("192.0.2.254") is None
