import random
import socket
from pathlib import Path

import pytest

from nemo_rl.distributed import machine as ports
from nemo_rl.distributed.machine import unused_port, unused_ports


def kernels(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "range").write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL_PORT_RANGE", folder / "range")


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
