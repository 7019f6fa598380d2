"""The Ray cluster of this process: joined by address, or a local one; and what it has."""

import logging
import os
import socket
from typing import Any

import ray

from nemo_rl.errors import WorkerError

LOGGER = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 256 * 1024 * 1024  # of a local cluster: only small messages pass, weights have their own way


ADDRESS_KEYS = "cluster.address, else RAY_ADDRESS"
ANSWER_S = 30.0


def cluster_address(address: str | None = None) -> str | None:
    """Of the running cluster to join: the one given, else RAY_ADDRESS; None: a local one is started."""
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
        _check_answers(found)
        try:
            ray.init(address=found, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"no Ray cluster can be joined at {found!r} ({ADDRESS_KEYS}): {error}") from error
        LOGGER.info("connected to the Ray cluster at %s", found)
        return
    ray.init(
        address="local", num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **quiet
    )
    LOGGER.info("started a local Ray cluster")


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes, and then end the process."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():  # "auto", or Ray's to understand
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise WorkerError(f"no Ray cluster answers at {address!r} ({ADDRESS_KEYS}): {error}") from error


def shutdown() -> None:
    """Leave the cluster; actors of this process end, and so does a local cluster."""
    ray.shutdown()


def nodes() -> list[dict[str, Any]]:
    """Ray's records of the machines that are there."""
    return [node for node in ray.nodes() if node["Alive"]]


def resources_text(resource: str | None) -> str:
    """The machines of the cluster and how much each has of `resource` (None: of CPUs), for error messages."""
    name = resource or "CPU"
    found = [f"{node['NodeManagerAddress']} ({node['Resources'].get(name, 0):g} {name})" for node in nodes()]
    free = ray.available_resources().get(name, 0)
    return f"{len(found)} {'node' if len(found) == 1 else 'nodes'}: {', '.join(found)}, {free:g} {name} free"
