"""A cluster that a run starts: nothing of it listens beyond this machine, and without its token nobody may use it."""

import asyncio
import contextlib
import ipaddress
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import worker

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.distributed.cluster import TOKEN, TOKEN_FILE, TOKEN_MODE, connect, reserve, shutdown
from nemo_rl.distributed.tensor_transfer import Rendezvous
from nemo_rl.distributed.worker_group import WorkerGroup
from tests.contracts.standing import Rank

DEADLINE_S = 300.0
TWO_RANKS = Layout("cpu", 1, 0, (DeviceSlot(0), DeviceSlot(0)), (DeviceSlot(0),), is_split=False, needs_cluster=True)
JOINS = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print('used it', len(ray.nodes()))"
CONNECTS = "import sys; from nemo_rl.distributed.cluster import connect; connect(sys.argv[1]); print('used it')"
CALLS_GCS = (
    "import sys; from ray._raylet import GcsClient; client = GcsClient(address=sys.argv[1]); "
    "client.internal_kv_put(b'key', b'value', True, b'space', 20); print('used it')"
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    shutdown()
    connect(num_cpus=2)
    yield
    shutdown()


@asynccontextmanager
async def two_ranks() -> AsyncIterator[WorkerGroup]:
    reservation = await reserve(TWO_RANKS, timeout_s=DEADLINE_S)
    slots = [reservation.slot(device_slot) for device_slot in TWO_RANKS.ranks]
    group = await WorkerGroup.create(Rank, slots=slots, role="rank", timeout_s=DEADLINE_S)
    try:
        yield group
    finally:
        group.kill()
        reservation.release()


def listeners(process: psutil.Process) -> list[str]:
    """Return the addresses at which a process listens; none of one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
        return [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return []


def command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def test_every_process_listens_on_loopback_alone() -> None:
    async def main() -> None:
        async with two_ranks() as group:
            assert await group.call_all("sum_of_ranks") == [1.0, 1.0]
            meeting = Rendezvous(ray.util.get_node_ip_address())
            assert is_loopback(meeting.host)
            driver = psutil.Process()
            found = {p.pid: (p.name(), listeners(p)) for p in [driver, *driver.children(recursive=True)]}
            assert {pid for pid, (_, addresses) in found.items() if addresses} >= {driver.pid, *await group.pids()}
            assert {"gcs_server", "raylet"} <= {name for name, addresses in found.values() if addresses}
            exposed = [(name, a) for name, addresses in found.values() for a in addresses if not is_loopback(a)]
            assert exposed == []

    asyncio.run(main())


def start_stranger(script: str, directory: Path, **variables: str) -> "subprocess.Popen[str]":
    """Start a process that knows the cluster's address, and nothing else of the environment that belongs to Ray."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(directory), **variables}
    command = [sys.executable, "-c", script, ray.get_runtime_context().gcs_address]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_stranger_without_the_token_is_refused(tmp_path: Path) -> None:
    right, wrong = {TOKEN_FILE: os.environ[TOKEN_FILE]}, {TOKEN: "0" * 64}
    ray_alone = start_stranger(JOINS, tmp_path)  # it tries for minutes
    refused = [
        start_stranger(CONNECTS, tmp_path),
        start_stranger(CALLS_GCS, tmp_path, **{TOKEN_MODE: "token", **wrong}),
    ]
    accepted = start_stranger(CALLS_GCS, tmp_path, **{TOKEN_MODE: "token", **right})
    try:
        for stranger in refused:
            text = stranger.communicate(timeout=DEADLINE_S)[0]
            assert "used it" not in text
            assert "InvalidAuthToken" in text, text
        assert "used it" in accepted.communicate(timeout=DEADLINE_S)[0]
        ray_alone.kill()
        assert "used it" not in ray_alone.communicate(timeout=DEADLINE_S)[0]
    finally:
        for stranger in (ray_alone, *refused, accepted):
            stranger.kill()


def test_token_is_private_and_written_nowhere_else() -> None:
    path = Path(os.environ[TOKEN_FILE])
    token = path.read_text()
    assert len(token) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert TOKEN not in os.environ
    assert worker._global_node is not None
    logs = [file for file in Path(worker._global_node.get_session_dir_path()).rglob("*") if file.is_file()]
    assert logs
    assert [file for file in logs if token.encode() in file.read_bytes()] == []
    assert not [p for p in psutil.Process().children(recursive=True) if token in command_line(p)]
