"""The Ray cluster of this process, joined by address or local, and a run's reservation of its nodes and GPUs."""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.errors import WorkerError

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20  # of a local cluster: only small messages pass, weights have their own way
ADDRESS_KEYS = "cluster.address, else RAY_ADDRESS"
CONNECT_TIMEOUT_S = 30.0
CPUS_PER_NODE = 0.01  # reserved: a bundle must hold something; how many threads compute is not Ray's to count
POLL_S = 1  # Ray wants whole seconds
PROBE_S = 120.0  # for a node to report its GPUs


def node_ip() -> str:
    """Return the address by which the cluster reaches this machine; needs no connection to a cluster."""
    return ray.util.get_node_ip_address()


def cluster_address(address: str | None = None) -> str | None:
    """Return the address of the cluster to join: the one given, else RAY_ADDRESS; None: a local one is started."""
    return address or os.environ.get("RAY_ADDRESS") or None


def connect(address: str | None = None, *, num_cpus: int | None = None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS, or start a local one; nothing where this process is connected.

    `num_cpus` is what a local cluster may hand out; None: the machine's cores.
    Raises WorkerError when there is no cluster at the address.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if found := cluster_address(address):
        _check_reachable(found)
        try:
            ray.init(address=found, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"no Ray cluster can be joined at {found!r} ({ADDRESS_KEYS}): {error}") from error
        logger.info("connected to the Ray cluster at %s", found)
        return
    ray.init(
        address="local", num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **quiet
    )
    logger.info("started a local Ray cluster")


def _check_reachable(address: str) -> None:
    """Raise WorkerError where nothing listens: Ray itself would try for minutes, and then end the process."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():  # "auto", or Ray's to understand
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise WorkerError(f"no Ray cluster answers at {address!r} ({ADDRESS_KEYS}): {error}") from error


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
    node_cpus: float  # of the whole node
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
    return [
        _Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("CPU", 1), gpus)
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
