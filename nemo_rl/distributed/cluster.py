"""The Ray cluster of this process, joined by address or local, and a run's reservation of its nodes and GPUs."""

import asyncio
import atexit
import ipaddress
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.distributed.machine import LOOPBACK_INTERFACE, interface_of, outward_address, write_private
from nemo_rl.errors import WorkerError

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20  # minimum of a local cluster; weights do not go through it
SHARED_MEMORY = Path("/dev/shm")  # Ray's store is in it
ADDRESS_KEYS = "cluster.address, else RAY_ADDRESS"
CONNECT_TIMEOUT_S = 30.0
CPUS_PER_NODE = 0.01  # a bundle must hold something; Ray does not count compute threads
POLL_S = 1  # Ray wants whole seconds
PROBE_S = 120.0  # limit for a node to report its GPUs
TOKEN, TOKEN_FILE, TOKEN_MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"  # Ray's variables
TOKEN_BYTES = 32
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's variable; 0: the node's address is 127.0.0.1
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch's variable, read when a process group is made
HEAD_TIMEOUT, HEAD_TIMEOUT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", "15"  # after which a local cluster is given up


def node_ip() -> str:
    """Return the address by which the cluster reaches this machine; without a cluster that of its default route."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else outward_address()


def use_node_interface() -> None:
    """Let gloo, in this process and those that it starts, listen at the address by which the cluster knows this node.

    By itself it listens at the address of the host's name, which is 127.0.1.1 on Debian and Ubuntu: other nodes would
    connect to themselves. An interface that the environment names is kept.
    """
    if (interface := interface_of(node_ip())) is not None:
        os.environ.setdefault(GLOO_INTERFACE, interface)


def cluster_address(address: str | None = None) -> str | None:
    """Return the address of the cluster to join: the one given, else RAY_ADDRESS; None: a local one is started."""
    found = address or os.environ.get("RAY_ADDRESS")
    return None if not found or found == "local" else found


def connect(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    object_store_bytes: int = 0,
    env_vars: Mapping[str, str] | None = None,
) -> None:
    """Join the cluster at `address` or RAY_ADDRESS, or start a local one; do nothing if already connected.

    `num_cpus` is what a local cluster may hand out; None: the machine's cores. `object_store_bytes` is what is in the
    object store of a node at once: a local cluster is started with as much, and a smaller store is warned of.
    `env_vars` are set for all actors. A local cluster listens on the loopback interface alone and requires a token;
    one that is joined gets the token of this process's environment.
    Raises WorkerError if there is no cluster at the address, or it refuses the token.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if env_vars:
        quiet["runtime_env"] = {"env_vars": dict(env_vars)}
    if found := cluster_address(address):
        _check_reachable(found)
        try:
            ray.init(address=found, **quiet)
        except ray.exceptions.AuthenticationError as error:
            raise WorkerError(_describe_refusal(found, error)) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"no Ray cluster can be joined at {found!r} ({ADDRESS_KEYS}): {error}") from error
        logger.info("connected to the Ray cluster at %s", found)
        warn_of_small_stores(nodes(), object_store_bytes)
        return
    size = max(OBJECT_STORE_BYTES, object_store_bytes)
    ensure_token()
    os.environ.setdefault(HEAD_TIMEOUT, HEAD_TIMEOUT_S)  # Ray's own is 60 s, in case the head starts again
    if LOOPBACK_INTERFACE is not None:  # gloo reads it in ranks and engines, which inherit it
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK_INTERFACE)
    try:
        ray.init(address="local", num_cpus=num_cpus, object_store_memory=size, include_dashboard=False, **quiet)
    except Exception as error:  # Ray's own for a node that does not come up has no other class
        raise WorkerError(f"no local Ray cluster could be started: {type(error).__name__}: {error}") from error
    logger.info("started a local Ray cluster with an object store of %d MiB", size // 2**20)
    if not ipaddress.ip_address(node_ip()).is_loopback:
        logger.warning("the local Ray cluster listens on all interfaces: set %s=0 before Ray is imported", LOOPBACK)
    if SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(SHARED_MEMORY).free) < size - OBJECT_STORE_BYTES:
        logger.warning(
            "%s has %d MiB left, and batches and scores of a step take %d MiB: Ray keeps them on a disk instead",
            SHARED_MEMORY,
            free // 2**20,
            object_store_bytes // 2**20,
        )


def ensure_token() -> None:
    """Create a token for the clusters that this process starts, unless its environment has one.

    The variable, which the processes of the cluster inherit, names a file of mode 600 in a directory of mode 700; both
    are removed when this process ends. Ray's own token, ~/.ray/auth_token, is shared by all clusters of a user, and
    others may read it.
    """
    if os.environ.get(TOKEN) or os.environ.get(TOKEN_FILE):
        return
    directory = tempfile.mkdtemp(prefix="nemo_rl_ray_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_private(Path(directory, "token"), secrets.token_hex(TOKEN_BYTES))
    os.environ[TOKEN_FILE] = str(Path(directory, "token"))


def _describe_refusal(address: str, error: object) -> str:
    mode, has_token = os.environ.get(TOKEN_MODE), bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_FILE))
    reason = str(error).partition(".")[0]
    here = f"{TOKEN_MODE} is {mode or 'not set'}, {TOKEN} or {TOKEN_FILE} is {'set' if has_token else 'not set'}"
    cure = f"set {TOKEN_MODE}=token and {TOKEN_FILE} to the file with its token"
    return f"the Ray cluster at {address!r} ({ADDRESS_KEYS}) refused to be joined: {reason}; {here}; {cure}"


def warn_of_small_stores(records: Iterable[Mapping[str, Any]], needed: int) -> None:
    """Log a warning for each node whose object store holds less than `needed` bytes; records as of `nodes`."""
    for node in records:
        size = int(node["Resources"].get("object_store_memory", 0))
        if size < needed:
            logger.warning(
                "the object store of node %s holds %d MiB, and batches and scores of a step take %d MiB, which Ray "
                "would write to its disk: start Ray there with --object-store-memory=%d",
                node["NodeManagerAddress"],
                size // 2**20,
                needed // 2**20,
                needed,
            )


def _check_reachable(address: str) -> None:
    """Raise WorkerError if nothing listens or the token is refused: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():  # "auto", or a form that Ray parses
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise WorkerError(f"no Ray cluster answers at {address!r} ({ADDRESS_KEYS}): {error}") from error
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]  # `ray status`
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        logger.debug("%s does not answer `ray status` in %g s", address, CONNECT_TIMEOUT_S)
        return
    if refusal := re.search(r"AuthenticationError: (.*)", asked.stderr):
        raise WorkerError(_describe_refusal(address, refusal[1]))


def shutdown() -> None:
    """Leave the cluster; actors of this process end, and so does a local cluster."""
    ray.shutdown()


def nodes() -> list[dict[str, Any]]:
    """Return Ray's records of the nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def describe_resources(resource: str | None) -> str:
    """Describe the nodes of the cluster and how much each has of `resource` (None: CPUs), for errors."""
    name = resource or "CPU"
    found = [f"{node['NodeManagerAddress']} ({node['Resources'].get(name, 0):g} {name})" for node in nodes()]
    free = ray.available_resources().get(name, 0)
    return f"{len(found)} {'node' if len(found) == 1 else 'nodes'}: {', '.join(found)}, {free:g} {name} free"


@dataclass(frozen=True, slots=True)
class ReservedSlot:
    """Reserved resources of an actor, and the GPUs that it sees."""

    node_id: str
    node_ip: str
    node_cpus: float  # cores for all ranks on the node
    strategy: Any  # Ray's scheduling strategy
    env_vars: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Node:
    node_id: str
    node_ip: str
    node_cpus: float
    gpu_ids: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them on that node; empty without CUDA


class Reservation:
    """A run's nodes and GPUs, set aside until `release` or the end of this process. Made by `reserve`."""

    def __init__(self, group: PlacementGroup, reserved: list[_Node]) -> None:
        self._group = group
        self._nodes = reserved

    def slot(self, device_slot: DeviceSlot) -> ReservedSlot:
        """Return the slot for `spawn_actor`; several actors may share one."""
        node = self._nodes[device_slot.node]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=device_slot.node)
        env_vars: dict[str, str] = {}
        if node.gpu_ids:
            visible = ",".join(node.gpu_ids[gpu] for gpu in device_slot.gpus)
            env_vars = {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        return ReservedSlot(node.node_id, node.node_ip, node.node_cpus, strategy, env_vars)

    def release(self) -> None:
        """Free all resources; actors on them end."""
        if ray.is_initialized():
            remove_placement_group(self._group)


async def reserve(
    layout: Layout,
    *,
    timeout_s: float,
    may_grow: bool = False,
    gpu_resource: str = "GPU",
    keys: str = "cluster.num_nodes, cluster.gpus_per_node",
) -> Reservation:
    """Set aside the layout's nodes, each a machine of its own, with its GPUs.

    `may_grow`: machines may still join, so a cluster that is too small is waited for. `gpu_resource` is Ray's name of
    what a GPU takes; any other name than GPU means simulated ones, which no process sees. `keys` are named in errors.

    Raises:
        WorkerError: not available, or not within `timeout_s`; says what was requested and what the cluster has.
    """
    bundle = {"CPU": CPUS_PER_NODE} | ({gpu_resource: layout.gpus_per_node} if layout.gpus_per_node else {})
    if not may_grow:
        _check_capacity(layout, bundle, keys)
    group = placement_group([bundle] * layout.num_nodes, strategy="STRICT_SPREAD")
    try:
        async with asyncio.timeout(timeout_s):
            while not await asyncio.to_thread(group.wait, POLL_S):
                pass
        reserved = await _resolve_nodes(group, layout, has_gpus=layout.gpus_per_node > 0 and gpu_resource == "GPU")
    except TimeoutError as error:
        remove_placement_group(group)
        raise _placement_error(layout, bundle, keys, f"within {timeout_s:g} s (cluster.start_timeout_s)") from error
    except BaseException:
        remove_placement_group(group)
        raise
    return Reservation(group, reserved)


def _check_capacity(layout: Layout, bundle: Mapping[str, float], keys: str) -> None:
    fits = [node for node in nodes() if all(node["Resources"].get(name, 0) >= n for name, n in bundle.items())]
    if len(fits) < layout.num_nodes:
        raise _placement_error(layout, bundle, keys, "on this cluster")


def _placement_error(layout: Layout, bundle: Mapping[str, float], keys: str, why: str) -> WorkerError:
    gpus = next((name for name in bundle if name != "CPU"), None)
    asked = f"{layout.num_nodes} {'node' if layout.num_nodes == 1 else 'nodes'}"
    if gpus:
        asked += f" with {layout.gpus_per_node} {gpus} each"
    return WorkerError(f"cannot place {asked} ({keys}) {why}; it has {describe_resources(gpus)}")


async def _resolve_nodes(group: PlacementGroup, layout: Layout, *, has_gpus: bool) -> list[_Node]:
    by_id = {node["NodeID"]: node for node in nodes()}
    ids = placement_group_table(group)["bundles_to_node_id"]
    gpu_ids: list[tuple[str, ...]] = [()] * layout.num_nodes
    if has_gpus:
        gpu_ids = await asyncio.gather(*(_gpu_ids(group, i, layout.gpus_per_node) for i in range(layout.num_nodes)))
    found = [by_id[ids[index]] for index in range(layout.num_nodes)]
    parts = 2 if layout.divides_cores else 1
    return [
        _Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("CPU", 1) / parts, gpus)
        for node, gpus in zip(found, gpu_ids, strict=True)
    ]


async def _gpu_ids(group: PlacementGroup, index: int, count: int) -> tuple[str, ...]:
    """Return the devices of a bundle, which stay the same for as long as it exists."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    reference = ray.remote(_own_gpu_ids).options(num_cpus=0, num_gpus=count, scheduling_strategy=strategy).remote()
    try:
        async with asyncio.timeout(PROBE_S):
            return await reference
    except TimeoutError as error:
        raise WorkerError(f"node {index} did not report its GPUs in {PROBE_S:g} s") from error


def _own_gpu_ids() -> tuple[str, ...]:
    return tuple(str(gpu) for gpu in sorted(ray.get_gpu_ids()))
