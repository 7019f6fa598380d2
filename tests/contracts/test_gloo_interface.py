"""Gloo between two machines whose host names mean 127.0.1.1, as Debian and Ubuntu have it: two network namespaces."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.distributed.cluster import GLOO_INTERFACE
from nemo_rl.distributed.machine import unused_port

DEADLINE_S = 120.0
ADDRESSES = ("198.18.77.1", "198.18.77.2")  # of the block for tests of networks (RFC 2544)
MACHINE = 'hostname machine && mount --bind "$1" /etc/hosts && shift && exec "$@"'
ALL_REDUCE = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from nemo_rl.distributed import cluster

rank, own, port, uses_interface = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "True"
cluster.node_ip = lambda: own
if uses_interface:
    cluster.use_node_interface()
arguments = {"init_method": f"tcp://198.18.77.1:{port}", "rank": rank, "world_size": 2}
dist.init_process_group("gloo", timeout=timedelta(seconds=10 if not uses_interface else 60), **arguments)
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
print(value.item())
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces that reach each other; skips where the kernel or the user may not make them."""
    names = [f"nemo-rl-{os.getpid()}-{index}" for index in range(2)]
    ends = [f"nrl{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            run("ip", "link", "set", end, "netns", name)
            inside = ("ip", "netns", "exec", name, "ip")
            run(*inside, "address", "add", f"{address}/24", "dev", end)
            run(*inside, "link", "set", end, "up")
            run(*inside, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces: {error}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes network namespaces")
@pytest.mark.parametrize("uses_interface", [True, pytest.param(False, marks=pytest.mark.slow)])  # it waits
def test_ranks_on_two_machines_meet_although_their_names_mean_the_machine_itself(
    uses_interface: bool, namespaces: list[str], tmp_path: Path
) -> None:
    hosts, port = tmp_path / "hosts", str(unused_port("127.0.0.1"))
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 machine\n")
    variables = {name: value for name, value in os.environ.items() if name != GLOO_INTERFACE}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", MACHINE, "sh", str(hosts),
             sys.executable, "-c", ALL_REDUCE, str(rank), ADDRESSES[rank], port, str(uses_interface)],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, name in enumerate(namespaces)
    ]  # fmt: skip
    answers = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    if uses_interface:
        assert [out for out, _ in answers] == ["3.0\n", "3.0\n"], answers
    else:  # what this is about: each connects to itself
        assert all(rank.returncode != 0 for rank in ranks)
        assert any("127.0.1.1" in error for _, error in answers), answers
