"""Where this process runs, as other machines of the cluster see it."""

import ray.util


def node_ip() -> str:
    """The address of this machine that others of the cluster reach it by; needs no connection to a cluster."""
    return ray.util.get_node_ip_address()
