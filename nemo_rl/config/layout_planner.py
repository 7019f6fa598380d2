"""The planner of layouts: how many policy ranks and engines there are, and on which node and GPUs each runs."""

from collections.abc import Iterable
from dataclasses import replace

from nemo_rl.config.environment import RewardModelPlacementConfig
from nemo_rl.config.layout import Device, DevicePool, DeviceSlot, Layout
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.policy import GenerationConfig, ParallelModelConfig, PolicyConfig, TeacherConfig
from nemo_rl.config.shared_sections import ClusterConfig
from nemo_rl.errors import ConfigError

REPLICAS = "policy.generation.num_replicas"
RESOURCES = "policy.generation.colocated.resources"


def spread_over_nodes(count: int, nodes: range) -> tuple[DeviceSlot, ...]:
    """Return `count` slots spread evenly over the nodes; neighbours stay together."""
    return tuple(DeviceSlot(nodes[index * len(nodes) // count]) for index in range(count))


def assign_ranks(pool: DevicePool, model: ParallelModelConfig, device: Device, *, key: str) -> tuple[DeviceSlot, ...]:
    """Return one slot per GPU; on a CPU as many as the section `key` sets. Tensor-parallel ranks are neighbours on
    a node.

    Raises:
        ConfigError: they do not fit.
    """
    data, copy = model.data_parallel_size, model.model_parallel_size
    if device == "cuda":
        _check_gpus(pool, model, key)
    data = data or (1 if device == "cpu" else pool.num_gpus // copy)
    model.parallelism.experts_on(data, key=f"{key}.{model.backend_key}")
    if device == "cpu":
        return spread_over_nodes(data * copy, pool.nodes)
    gpus = [DeviceSlot(node, (gpu,)) for node in pool.nodes for gpu in pool.gpus]
    return tuple(gpus[: data * copy])


def _check_gpus(pool: DevicePool, model: ParallelModelConfig, key: str) -> None:
    """Check that every rank has a GPU, and that the ranks that share a layer are on one node."""
    owner = "the policy" if key == "policy" else "the teacher"
    section, parallelism = f"{key}.{model.backend_key}", model.parallelism
    tensor_key = f"{section}.{parallelism.TENSOR_PARALLEL_KEY}"
    pipeline_key = f"{section}.{parallelism.PIPELINE_PARALLEL_KEY or parallelism.TENSOR_PARALLEL_KEY}"
    data, tensor, stages = model.data_parallel_size, model.tensor_parallel_size, model.pipeline_parallel_size
    context, context_key = model.context_parallel_size, f"{section}.context_parallel_size"
    slices = f" and {context_key} = {context}" if context > 1 else ""
    if len(pool.gpus) % tensor:
        raise ConfigError(tensor_key, tensor, f"must divide the {len(pool.gpus)} GPUs that {owner} has on a node")
    has = f"{owner} has {pool.num_gpus} (cluster.num_nodes, cluster.gpus_per_node)"
    if model.model_parallel_size > pool.num_gpus:
        named, size = (context_key, context) if context > 1 else (pipeline_key, stages)
        raise ConfigError(
            named,
            size,
            f"with {tensor_key} = {tensor} these are {model.model_parallel_size} ranks, one GPU each; {has}; allowed: "
            f"at most {pool.num_gpus * size // model.model_parallel_size}",
        )
    if data is not None and data * model.model_parallel_size > pool.num_gpus:
        has_stages = parallelism.PIPELINE_PARALLEL_KEY is not None
        sizes = f"{tensor_key} = {tensor}{slices}" + (f" and {pipeline_key} = {stages}" if has_stages else "")
        raise ConfigError(
            f"{section}.data_parallel_size",
            data,
            f"with {sizes} these are {data * model.model_parallel_size} ranks, one GPU each; {has}; allowed: "
            f"at most {pool.num_gpus // model.model_parallel_size}",
        )


def allocate_teacher_pools(
    config: TrainingRunConfig, cluster_pool: DevicePool, device: Device
) -> tuple[dict[str, DevicePool], DevicePool]:
    """Return the pool of each teacher that is not colocated, and the pool left for policy and engines."""
    pools: dict[str, DevicePool] = {}
    left = cluster_pool
    for key, section in config.teacher_sections.items():
        if section.server is None and section.device not in ("auto", device):
            raise ConfigError(f"{key}.device", section.device, f"the run computes on {device}; allowed: auto, {device}")
        if section.server is None and not section.colocated.enabled:
            pools[key], left = _take_pool(key, section, left, device)
    return pools, left


def _take_pool(key: str, section: TeacherConfig, left: DevicePool, device: Device) -> tuple[DevicePool, DevicePool]:
    """Return the teacher's pool and the remaining one."""
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


def make_reward_model_layout(pool: RewardModelPlacementConfig, device: Device) -> Layout:
    """Return a layout of reward models on nodes of their own, one per GPU; on a CPU one per process."""
    gpus = range(pool.n_gpus_per_node)
    places = tuple(DeviceSlot(node, (gpu,) if device == "cuda" else ()) for node in range(pool.nnodes) for gpu in gpus)
    return Layout(
        device=device,
        num_nodes=pool.nnodes,
        gpus_per_node=pool.n_gpus_per_node if device == "cuda" else 0,
        ranks=(),
        engines=places,
        is_split=True,
        needs_cluster=True,
    )


def make_layout(config: TrainingRunConfig, device: Device) -> Layout:
    """Return the layout on `device`; raises ConfigError, with the key and what is allowed, for an impossible one."""
    cluster, policy, generation = config.cluster, config.policy, config.policy.generation
    _check_gpus_of_layout(cluster, device)
    cluster_pool = DevicePool(range(cluster.num_nodes), range(cluster.gpus_per_node if device == "cuda" else 0))
    teacher_pools, remaining_pool = allocate_teacher_pools(config, cluster_pool, device)
    policy_pool, engine_pool = _split_pool(config, remaining_pool, device)
    ranks = _assign_policy_ranks(policy, policy_pool, device)
    own_teachers = {key: section for key, section in config.teacher_sections.items() if section.server is None}
    teachers = {
        key: assign_ranks(teacher_pools.get(key, policy_pool), section, device, key=key)
        for key, section in own_teachers.items()
    }
    engines = _assign_engines(generation, engine_pool, device)
    is_split = policy_pool != engine_pool
    several = _needs_cluster((policy, *own_teachers.values()), cluster, (ranks, engines, *teachers.values()))
    layout = Layout(
        device=device,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node if device == "cuda" else 0,
        ranks=ranks,
        engines=engines,
        is_split=is_split,
        needs_cluster=several or is_split or remaining_pool != cluster_pool,
        teachers=teachers,
        engine_in_driver=generation.runs_in_driver,
        ranks_gather_all=policy.parallelism.GATHERS_ON_ALL_RANKS,
        divides_cores=device == "cpu" and not is_split and config.algorithm.background.overlaps,
    )
    generation.check_layout(layout, collects_in_background=config.algorithm.background.enabled)
    engine = generation.for_layout(layout, samples_beside_training=config.algorithm.samples_beside_training)
    return replace(layout, engine_with_policy=engine.shares_process and not layout.needs_cluster)


def make_policy_layout(policy: PolicyConfig, cluster: ClusterConfig, device: Device) -> Layout:
    """Return the policy's ranks on all of the cluster, without engines; raises as `make_layout`."""
    _check_gpus_of_layout(cluster, device)
    gpus = cluster.gpus_per_node if device == "cuda" else 0
    ranks = _assign_policy_ranks(policy, DevicePool(range(cluster.num_nodes), range(gpus)), device)
    return Layout(
        device=device,
        num_nodes=cluster.num_nodes,
        gpus_per_node=gpus,
        ranks=ranks,
        engines=(),
        is_split=False,
        needs_cluster=_needs_cluster((policy,), cluster, (ranks,)),
    )


def _needs_cluster(
    models: Iterable[ParallelModelConfig], cluster: ClusterConfig, processes: Iterable[tuple[DeviceSlot, ...]]
) -> bool:
    """Return whether there are several processes, or a model that needs a process of its own."""
    several = any(len(places) > 1 for places in processes)
    needs_own_process = any(model.parallelism.NEEDS_OWN_PROCESS for model in models)
    return several or needs_own_process or cluster.num_nodes > 1 or cluster.address is not None


def _check_gpus_of_layout(cluster: ClusterConfig, device: Device) -> None:
    if device == "cuda" and cluster.gpus_per_node == 0:
        raise ConfigError("cluster.gpus_per_node", 0, "policy.device is cuda; allowed: 1 or more, or policy.device=cpu")


def _split_pool(config: TrainingRunConfig, cluster_pool: DevicePool, device: Device) -> tuple[DevicePool, DevicePool]:
    """Return the policy's and the engines' share of what teachers leave: the same pool if they are colocated."""
    nodes, gpus = len(cluster_pool.nodes), len(cluster_pool.gpus)
    if config.policy.generation.colocated.enabled:
        return cluster_pool, cluster_pool
    wanted = config.policy.generation.colocated.resources
    if wanted.num_nodes is not None and not wanted.num_nodes == nodes == 1:
        if wanted.num_nodes >= nodes:
            raise ConfigError(
                f"{RESOURCES}.num_nodes",
                wanted.num_nodes,
                f"leaves the policy no node of cluster.num_nodes = {nodes}; allowed: less than that, "
                "or null for nodes shared with the policy",
            )
        first = nodes - wanted.num_nodes
        return DevicePool(range(first), range(gpus)), DevicePool(
            range(first, nodes), range(_engine_gpus_per_node(config, gpus))
        )
    if device == "cpu":
        return cluster_pool, cluster_pool  # a CPU is not divided
    own = wanted.gpus_per_node
    if own is None or own >= gpus:
        raise ConfigError(
            f"{RESOURCES}.gpus_per_node",
            own,
            f"with policy.generation.colocated.enabled = false the engines take some of the GPUs of each node, and "
            f"the policy has the others: cluster.gpus_per_node = {gpus}; "
            + (f"allowed: 1 to {gpus - 1}" if gpus > 1 else "at least 2 are needed, or colocated.enabled: true"),
        )
    return DevicePool(range(nodes), range(gpus - own)), DevicePool(range(nodes), range(gpus - own, gpus))


def _engine_gpus_per_node(config: TrainingRunConfig, gpus: int) -> int:
    """Return the number of GPUs that the engines use on nodes of their own."""
    own = config.policy.generation.colocated.resources.gpus_per_node
    if own is not None and gpus and own > gpus:
        raise ConfigError(f"{RESOURCES}.gpus_per_node", own, f"allowed: at most cluster.gpus_per_node = {gpus}")
    return min(own or gpus, gpus)


def _assign_policy_ranks(policy: PolicyConfig, pool: DevicePool, device: Device) -> tuple[DeviceSlot, ...]:
    ranks = assign_ranks(pool, policy, device, key="policy")
    data = len(ranks) // policy.model_parallel_size
    if policy.train_global_batch_size % data:
        raise ConfigError(
            "policy.train_global_batch_size",
            policy.train_global_batch_size,
            f"must be a multiple of the {data} data parallel ranks, which share its samples",
        )
    return ranks


def _assign_engines(generation: GenerationConfig, pool: DevicePool, device: Device) -> tuple[DeviceSlot, ...]:
    wanted, tensor = generation.num_replicas, generation.gpus_per_engine
    if device == "cpu":
        return spread_over_nodes(wanted or 1, pool.nodes)
    if tensor > len(pool.gpus):
        raise ConfigError(
            generation.GPUS_PER_ENGINE_KEY,
            tensor,
            f"an engine runs on one node, where the engines have {len(pool.gpus)} GPUs; allowed: at most that",
        )
    starts = range(pool.gpus.start, pool.gpus.stop - tensor + 1, tensor)
    places = [DeviceSlot(node, tuple(range(start, start + tensor))) for node in pool.nodes for start in starts]
    if wanted is not None and wanted > len(places):
        raise ConfigError(
            REPLICAS,
            wanted,
            f"with {generation.GPUS_PER_ENGINE_KEY} = {tensor} the engines' {pool.num_gpus} GPUs hold {len(places)}; "
            f"allowed: at most {len(places)}",
        )
    return tuple(places[:wanted])
