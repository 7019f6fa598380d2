"""From the configuration to a layout: how many policy ranks and engines there are, on which node and GPUs each stands.

A layout names nodes and GPUs by their place in the run; distributed/placement.py finds real ones for them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nemo_rl.config.generation import GenerationSection
from nemo_rl.config.master import TrainingConfig
from nemo_rl.config.parallel import ParallelModel
from nemo_rl.config.places import Device, Place, Pool, spread
from nemo_rl.config.policy import Policy
from nemo_rl.config.rank_places import ranks_on
from nemo_rl.config.run import Cluster
from nemo_rl.config.scorers import RewardModelPlacement
from nemo_rl.config.teacher_layout import pools_of_teachers
from nemo_rl.errors import ConfigError

ENGINE_TENSOR_PARALLEL = "policy.generation.vllm_cfg.tensor_parallel_size"
REPLICAS = "policy.generation.num_replicas"
RESOURCES = "policy.generation.colocated.resources"


@dataclass(frozen=True, slots=True)
class Layout:
    """What runs where."""

    device: Device
    num_nodes: int
    gpus_per_node: int  # 0 on a CPU
    ranks: tuple[Place, ...]  # of the policy, in the order of ranks; the tensor parallel ones are neighbours
    engines: tuple[Place, ...]
    is_split: bool  # policy and engines stand on GPUs or nodes of their own
    needs_cluster: bool  # processes of their own: the policy's ranks and the engines are Ray actors
    teachers: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)  # ranks, by key; those served have none

    @property
    def policy_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({place.node for place in self.ranks}))

    @property
    def engine_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({place.node for place in self.engines}))


def pool_layout(pool: RewardModelPlacement, device: Device) -> Layout:
    """Nodes for reward models alone, a model on each GPU; on a CPU a process takes the place of a GPU."""
    gpus = range(pool.n_gpus_per_node)
    places = tuple(Place(node, (gpu,) if device == "cuda" else ()) for node in range(pool.nnodes) for gpu in gpus)
    return Layout(
        device=device,
        num_nodes=pool.nnodes,
        gpus_per_node=pool.n_gpus_per_node if device == "cuda" else 0,
        ranks=(),
        engines=places,
        is_split=True,
        needs_cluster=True,
    )


def layout_of(config: TrainingConfig, device: Device) -> Layout:
    """The layout on `device`; raises ConfigError, with the key and what is allowed, for one that cannot be."""
    cluster, policy, generation = config.cluster, config.policy, config.policy.generation
    _check_gpus(cluster, device)
    whole = Pool(range(cluster.num_nodes), range(cluster.gpus_per_node if device == "cuda" else 0))
    teacher_pools, left = pools_of_teachers(config, whole, device)
    policy_pool, engine_pool = _pools(config, left, device)
    ranks = _ranks(policy, policy_pool, device)
    own_teachers = {key: section for key, section in config.teacher_sections.items() if section.server is None}
    teachers = {
        key: ranks_on(teacher_pools.get(key, policy_pool), section, device, key=key)
        for key, section in own_teachers.items()
    }
    engines = _engines(generation, engine_pool, device)
    is_split = policy_pool != engine_pool
    several = _is_shared((policy, *own_teachers.values()), cluster, (ranks, engines, *teachers.values()))
    layout = Layout(
        device=device,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node if device == "cuda" else 0,
        ranks=ranks,
        engines=engines,
        is_split=is_split,
        needs_cluster=several or is_split or left != whole,
        teachers=teachers,
    )
    _check_hf_engine(generation, layout)
    _check_background_collection(config, layout)
    return layout


def policy_layout(policy: Policy, cluster: Cluster, device: Device) -> Layout:
    """The policy's ranks on all of the cluster, and no engine; raises as `layout_of`."""
    _check_gpus(cluster, device)
    gpus = cluster.gpus_per_node if device == "cuda" else 0
    ranks = _ranks(policy, Pool(range(cluster.num_nodes), range(gpus)), device)
    return Layout(
        device=device,
        num_nodes=cluster.num_nodes,
        gpus_per_node=gpus,
        ranks=ranks,
        engines=(),
        is_split=False,
        needs_cluster=_is_shared((policy,), cluster, (ranks,)),
    )


def _is_shared(models: Iterable[ParallelModel], cluster: Cluster, processes: Iterable[tuple[Place, ...]]) -> bool:
    """Several processes, or one of Megatron's, which wants a process of its own."""
    several = any(len(places) > 1 for places in processes)
    is_megatron = any(model.megatron_cfg.enabled for model in models)
    return several or is_megatron or cluster.num_nodes > 1 or cluster.address is not None


def _check_gpus(cluster: Cluster, device: Device) -> None:
    if device == "cuda" and cluster.gpus_per_node == 0:
        raise ConfigError("cluster.gpus_per_node", 0, "policy.device is cuda; allowed: 1 or more, or policy.device=cpu")


def _pools(config: TrainingConfig, whole: Pool, device: Device) -> tuple[Pool, Pool]:
    """The policy's and the engines' part of what teachers leave: the same where they are colocated."""
    nodes, gpus = len(whole.nodes), len(whole.gpus)
    if config.policy.generation.colocated.enabled:
        return whole, whole
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
        return Pool(range(first), range(gpus)), Pool(range(first, nodes), range(_of_a_node(config, gpus)))
    if device == "cpu":
        return whole, whole  # a CPU is not divided
    own = wanted.gpus_per_node
    if own is None or own >= gpus:
        raise ConfigError(
            f"{RESOURCES}.gpus_per_node",
            own,
            f"with policy.generation.colocated.enabled = false the engines take some of the GPUs of each node, and "
            f"the policy has the others: cluster.gpus_per_node = {gpus}; "
            + (f"allowed: 1 to {gpus - 1}" if gpus > 1 else "at least 2 are needed, or colocated.enabled: true"),
        )
    return Pool(range(nodes), range(gpus - own)), Pool(range(nodes), range(gpus - own, gpus))


def _of_a_node(config: TrainingConfig, gpus: int) -> int:
    """GPUs that the engines use on a node of their own."""
    own = config.policy.generation.colocated.resources.gpus_per_node
    if own is not None and gpus and own > gpus:
        raise ConfigError(f"{RESOURCES}.gpus_per_node", own, f"allowed: at most cluster.gpus_per_node = {gpus}")
    return min(own or gpus, gpus)


def _ranks(policy: Policy, pool: Pool, device: Device) -> tuple[Place, ...]:
    ranks = ranks_on(pool, policy, device, key="policy")
    data = len(ranks) // policy.ranks_of_a_copy
    if policy.train_global_batch_size % data:
        raise ConfigError(
            "policy.train_global_batch_size",
            policy.train_global_batch_size,
            f"must be a multiple of the {data} data parallel ranks, which share its samples",
        )
    return ranks


def _engines(generation: GenerationSection, pool: Pool, device: Device) -> tuple[Place, ...]:
    wanted, tensor = generation.num_replicas, generation.vllm_cfg.tensor_parallel_size
    if device == "cpu":
        return spread(wanted or 1, pool.nodes)
    if tensor > len(pool.gpus):
        raise ConfigError(
            ENGINE_TENSOR_PARALLEL,
            tensor,
            f"an engine stands on one node, where the engines have {len(pool.gpus)} GPUs; allowed: at most that",
        )
    starts = range(pool.gpus.start, pool.gpus.stop - tensor + 1, tensor)
    places = [Place(node, tuple(range(start, start + tensor))) for node in pool.nodes for start in starts]
    if wanted is not None and wanted > len(places):
        raise ConfigError(
            REPLICAS,
            wanted,
            f"with {ENGINE_TENSOR_PARALLEL} = {tensor} the engines' {pool.num_gpus} GPUs hold {len(places)}; "
            f"allowed: at most {len(places)}",
        )
    return tuple(places[:wanted])


def _check_hf_engine(generation: GenerationSection, layout: Layout) -> None:
    """It lives in the driver's process, and reads the weights that ranks on the same machine publish."""
    if generation.backend != "hf" or not layout.needs_cluster:
        return
    if len(layout.engines) > 1:
        raise ConfigError(REPLICAS, len(layout.engines), "the hf backend is one engine; allowed: 1, or backend: vllm")
    if layout.device == "cuda" or layout.num_nodes > 1:
        raise ConfigError(
            "policy.generation.backend",
            "hf",
            "runs in the driver's process: beside several ranks on one machine's CPU alone; allowed: vllm",
        )


def _check_background_collection(config: TrainingConfig, layout: Layout) -> None:
    """An engine that samples while the policy trains cannot give it its memory."""
    generation = config.policy.generation
    sleeps = generation.backend == "vllm" and generation.vllm_cfg.enable_sleep_mode is not False
    if config.algorithm.background.enabled and layout.device == "cuda" and not layout.is_split and sleeps:
        raise ConfigError(
            "policy.generation.vllm_cfg.enable_sleep_mode",
            generation.vllm_cfg.enable_sleep_mode,
            "rollouts are collected during training, and a colocated engine would sleep then; allowed: false, "
            "or policy.generation.colocated.enabled: false",
        )
