"""Where teachers stand: on the policy's devices, or on nodes or GPUs taken from the end of the cluster's."""

from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.places import Device, DevicePool
from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.errors import ConfigError


def allocate_teacher_pools(
    config: TrainingRunConfig, cluster_pool: DevicePool, device: Device
) -> tuple[dict[str, DevicePool], DevicePool]:
    """What each teacher that is not colocated has for itself, and what is left for policy and engines."""
    pools: dict[str, DevicePool] = {}
    left = cluster_pool
    for key, section in config.teacher_sections.items():
        if section.server is None and section.device not in ("auto", device):
            raise ConfigError(f"{key}.device", section.device, f"the run computes on {device}; allowed: auto, {device}")
        if section.server is None and not section.colocated.enabled:
            pools[key], left = _take_pool(key, section, left, device)
    return pools, left


def _take_pool(key: str, section: TeacherConfig, left: DevicePool, device: Device) -> tuple[DevicePool, DevicePool]:
    """The teacher's own, and what remains."""
    wanted = section.colocated.resources
    resources = f"{key}.colocated.resources"
    if wanted.num_nodes is not None:
        if wanted.num_nodes >= len(left.nodes):
            raise ConfigError(
                f"{resources}.num_nodes",
                wanted.num_nodes,
                f"leaves the policy none of {len(left.nodes)} nodes; allowed: less, or null for GPUs of all nodes",
            )
        first = left.nodes.stop - wanted.num_nodes
        gpus = left.gpus[: wanted.gpus_per_node] if wanted.gpus_per_node else left.gpus
        return DevicePool(range(first, left.nodes.stop), gpus), DevicePool(range(left.nodes.start, first), left.gpus)
    if device == "cpu":
        return left, left  # a CPU is not divided
    own = wanted.gpus_per_node
    if own is None or own >= len(left.gpus):
        raise ConfigError(
            f"{resources}.gpus_per_node",
            own,
            f"with {key}.colocated.enabled = false the teacher takes some of the {len(left.gpus)} GPUs of each node, "
            "and policy and engines have the others; allowed: less than that, or colocated.enabled: true",
        )
    first = left.gpus.stop - own
    return DevicePool(left.nodes, range(first, left.gpus.stop)), DevicePool(left.nodes, range(left.gpus.start, first))
