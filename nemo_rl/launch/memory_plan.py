"""The memory plan of a run: expected peaks per device and host by part, and the nearest cure if one is too large.

policy/memory.py has the formulas for policy and teachers. vLLM takes `gpu_memory_utilization` of a device
(vllm/v1/worker/utils.py, request_memory). `--dry-run` prints the plan, a start logs what does not fit, and
`policy.offload: auto` follows from it. Loads no torch unless a GPU is looked for. GB are 1e9 bytes.
"""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.environment import ModelScorerConfig
from nemo_rl.config.kinds import Section
from nemo_rl.config.layout import Layout
from nemo_rl.config.master import GRPORunConfig, TrainingRunConfig
from nemo_rl.config.policy import BackendConfig, PolicyConfig, TeacherConfig, resolve_chunk_size
from nemo_rl.config.supervised_runs import RewardModelRunConfig, SupervisedRunConfig
from nemo_rl.distributed.devices import Device, device_memory
from nemo_rl.launch.model_files import find_shape
from nemo_rl.policy.fsdp2.backend import KEPT_SHARE
from nemo_rl.policy.memory import ADAM_BYTES, OPTIMIZER_BYTES, ModelShape, RankMemory, UnknownShapeError

logger = logging.getLogger(__name__)

GB = 10**9
DEFAULT_CAPACITY = 80 * GB
CONTEXT_BYTES = 1 * GB  # assumed, per process on a device: CUDA's context, workspaces of libraries, NCCL's buffers
SLEEPING_BYTES = 1 * GB  # assumed, what an engine keeps while it sleeps: its context and CUDA graphs
PROCESS_BYTES = 4 * GB  # assumed, host memory of a process with torch and its libraries
FRAGMENTATION = 1.05  # assumed, what torch's allocator reserves per byte in use, with expandable segments
BUCKET_BYTES = 2 * GB  # both sides of a refit and what is gathered: distributed/tensor_transfer.py has 0.5 GiB each
CPU_CACHE_BYTES = 2**29  # vLLM's KV cache on a CPU: KV_CACHE_BYTES in generation/vllm/cpu/settings.py
MAX_GPUS = 1024  # most GPUs that a cure proposes

AnyTrainingConfig = TrainingRunConfig | SupervisedRunConfig


@dataclass(frozen=True, slots=True)
class Moment:
    """The parts that are on a device, or on a host, at the same time."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {size / GB:.1f}" for name, size in self.parts.items() if size >= GB / 20)
        return f"{self.name}: {self.total / GB:.1f} GB ({shown})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """An engine of one or several GPUs."""

    shape: ModelShape
    utilization: float  # share of each device
    gpus: int = 1
    weight_bytes: int = 2
    max_model_len: int = 512
    can_sleep: bool = True
    has_own_process: bool = True  # False: it is in the driver's (hf, and vLLM's in_process on a CPU)

    @property
    def weights(self) -> int:
        return self.weight_bytes * self.shape.parameters // self.gpus

    @property
    def smallest(self) -> int:
        """Return the least that it starts with: weights, and keys and values of one longest sequence."""
        return self.weights + self.shape.cache_bytes(self.max_model_len, self.weight_bytes) // self.gpus + CONTEXT_BYTES

    def awake(self, capacity: int) -> dict[str, int]:
        """Return its parts on devices of `capacity` bytes."""
        budget = max(int(self.utilization * capacity), self.smallest)
        return {"engine weights": self.weights, "KV cache and engine activations": budget - self.weights}

    def problem(self, capacity: int) -> str | None:
        """Return why its share of a device is too small; None if it is not."""
        if self.utilization * capacity >= self.smallest or self.utilization == 0:
            return None
        share = f"{self.utilization:g} of {capacity / GB:.0f} GB"
        return f"the engine needs {self.smallest / GB:.1f} GB for weights and one sequence, and has {share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """The models of a run, and how they share devices of `capacity` bytes."""

    capacity: int
    policy: RankMemory
    engine: EngineMemory | None = None  # None: supervised training
    teachers: Mapping[str, RankMemory] = field(default_factory=dict)
    shares_device: bool = False  # policy and engine
    offload: Literal["auto", "always", "never"] = "auto"  # policy.offload
    shared_teachers: frozenset[str] = frozenset()  # those that take turns with the policy
    ranks_per_node: int = 1
    engines_per_node: int = 1
    saves: bool = True  # checkpoints
    saves_whole_model: bool = True  # False: adapters alone
    backend_key: str = "policy.dtensor_cfg"
    micro_batch_keys: tuple[str, ...] = ("policy.sequence_packing.train_mb_tokens",)  # training and scoring
    tokens_per_unit: int = 1  # one unit of these keys

    @property
    def takes_turns(self) -> bool:
        """Return whether policy and engine leave a device that they share to each other (`policy.offload`).

        auto: unless everything fits with both on the device all the time.
        """
        if self.engine is None or not (self.shares_device and self.engine.can_sleep) or self.offload == "never":
            return False
        return self.offload == "always" or any(m.total > self.capacity for m in self._moments_awake(self.engine))

    @property
    def transport(self) -> int:
        """Return the bytes that a refit holds besides both weights: buckets, or the largest tensor on both sides."""
        return max(BUCKET_BYTES, 2 * self.policy.compute_bytes * self.policy.shape.head_parameters)

    def devices(self) -> dict[str, list[Moment]]:
        """Return the moments of each kind of device."""
        context = {"context": CONTEXT_BYTES}
        if self.engine is None or not self.shares_device:
            found = {"policy": self._policy_moments(context)}
        else:
            moments = self._moments_in_turns if self.takes_turns else self._moments_awake
            found = {"policy and engine": moments(self.engine)}
        if self.engine is not None and not self.shares_device:
            found["engine"] = [Moment("generation", {**self.engine.awake(self.capacity), **context})]
        for key, model in self.teachers.items():
            if key not in self.shared_teachers:
                found[key] = [Moment("scoring", {"weights": model.weights, "scoring": model.scoring, **context})]
        return found

    def host(self) -> Moment:
        """Return the memory of a node's processes at their largest."""
        policy, engine, ranks = self.policy, self.engine, self.ranks_per_node
        is_away = self.takes_turns or policy.is_offloaded or bool(self.shared_teachers)
        engines = self.engines_per_node if engine is not None and engine.has_own_process else 0
        parts = {
            "processes": PROCESS_BYTES * (1 + ranks + engines),
            "offloaded policy": ranks * (policy.weights + policy.optimizer + policy.reference) * is_away,
            "offloaded teachers": ranks * sum(self.teachers[key].weights for key in self.shared_teachers),
        }
        if self.saves:
            saved = 4 * policy.shape.parameters * self.saves_whole_model
            parts["checkpoint"] = saved + ranks * policy.optimizer
        return Moment("host", parts)

    def problems(self) -> list[str]:
        """Return the parts that do not fit on a device."""
        found = [
            f"{moment.name} needs {moment.total / GB:.1f} of {self.capacity / GB:.0f} GB ({device})"
            for device, moments in self.devices().items()
            for moment in moments
            if moment.total > self.capacity
        ]
        problem = None if self.engine is None else self.engine.problem(self.capacity)
        return found if problem is None else [*found, problem]

    @property
    def _resident(self) -> dict[str, int]:
        """Return the parts of the policy that stay on the device from step to step."""
        policy = self.policy
        if policy.is_offloaded:
            return {}
        return {"weights": policy.weights, "optimizer": policy.optimizer, "reference": policy.reference}

    def _policy_moments(self, beside: Mapping[str, int]) -> list[Moment]:
        """Return the moments of scoring and training with the parts `beside` on the device too."""
        policy = self.policy
        in_use = policy.activations + policy.gathered + policy.weights + policy.gradients + policy.optimizer
        training = {
            "gradients": policy.gradients * (not policy.is_offloaded),
            "activations": policy.activations,
            "gathered weights and logits": policy.gathered,
            "allocator": int((FRAGMENTATION - 1) * in_use),
        }
        teachers = {key: self.teachers[key] for key in sorted(self.shared_teachers)}
        return [
            *(
                Moment(f"scoring of {key}", {**beside, key: model.weights, "scoring": model.scoring})
                for key, model in teachers.items()
            ),
            Moment("log-probs", {**beside, **self._resident, "scoring": int(FRAGMENTATION * policy.scoring)}),
            Moment("training", {**beside, **self._resident, **training}),
        ]

    def _moments_awake(self, engine: EngineMemory) -> list[Moment]:
        """Return the moments of a device that holds the whole engine beside the policy; a refit empties the cache."""
        beside = {**engine.awake(self.capacity), "contexts": 2 * CONTEXT_BYTES}
        return [
            Moment("refit", {**beside, **self._resident, "transport": self.transport}),
            *self._policy_moments(beside),
        ]

    def _moments_in_turns(self, engine: EngineMemory) -> list[Moment]:
        """Return the moments of a device on which the engine sleeps while the policy trains, which leaves it then."""
        policy, awake = self.policy, {**engine.awake(self.capacity), "contexts": 2 * CONTEXT_BYTES}
        weights = {"weights": policy.weights * (not policy.is_offloaded)}
        asleep = {"sleeping engine": SLEEPING_BYTES, "context": CONTEXT_BYTES}
        # The first refit comes while the whole engine is awake; the reference is away by then.
        first = {"reference or transport": max(policy.reference, self.transport)}
        refit = {**weights, "engine weights": engine.weights, "transport": self.transport}
        return [
            Moment("start", {**awake, **weights, **first}),
            Moment("generation", awake),
            Moment("refit", {**refit, **asleep}),
            *self._policy_moments(asleep),
        ]


@dataclass(frozen=True, slots=True)
class Cure:
    """A change of the configuration that lowers a peak."""

    text: str  # overrides, if there are keys for it
    model: Literal["policy", "engine"]
    values: Mapping[str, Any]  # fields of that model

    def apply(self, memory: RunMemory) -> RunMemory:
        return replace(memory, **{self.model: replace(getattr(memory, self.model), **self.values)})


def find_cure(memory: RunMemory) -> str:
    """Return the nearest change with which everything fits: a single one if there is one, else several together."""

    def fits(cures: Sequence[Cure]) -> bool:
        changed = memory
        for cure in cures:
            changed = cure.apply(changed)
        return not changed.problems()

    kinds = [kind for kind in _cures(memory) if kind]
    chosen = [cure for kind in kinds for cure in kind if fits([cure])][:1]
    for kind in kinds:
        if not fits(chosen):
            chosen.append(next((cure for cure in kind if fits([*chosen, cure])), kind[-1]))
    if not fits(chosen):
        return "no change of this configuration is enough"
    for cure in list(chosen):
        others = [other for other in chosen if other is not cure]
        chosen = others if fits(others) else chosen
    return " ".join(cure.text for cure in chosen)


def _cures(memory: RunMemory) -> list[list[Cure]]:
    """Return the changes of each kind, the smallest first; kinds that cost speed precede those that cost GPUs."""
    policy, engine, vllm = memory.policy, memory.engine, "++policy.generation.vllm_cfg"
    shares: list[Cure] = []
    engines: list[Cure] = []
    if engine is not None:
        fitting = [n / 100 for n in range(95, 0, -5) if engine.smallest <= n / 100 * memory.capacity]
        smaller = [share for share in fitting if share < engine.utilization]
        shares = [Cure(f"{vllm}.gpu_memory_utilization={n:g}", "engine", {"utilization": n}) for n in smaller]
        numbers = [engine.gpus * n for n in (2, 4, 8)]
        engines = [Cure(f"{vllm}.tensor_parallel_size={n}", "engine", {"gpus": n}) for n in numbers]
    passes = []
    for tokens in (policy.train_tokens // 2, policy.train_tokens // 4):
        if tokens >= max(policy.longest, memory.tokens_per_unit):
            text = " ".join(f"++{key}={tokens // memory.tokens_per_unit}" for key in memory.micro_batch_keys)
            passes.append(Cure(text, "policy", {"train_tokens": tokens, "score_tokens": tokens}))
    switches = [
        ("keep_unsharded=false", {"is_kept_whole": False}, policy.is_kept_whole),
        ("activation_checkpointing=true", {"recomputes": True}, not policy.recomputes),
        ("cpu_offload=true", {"is_offloaded": True}, not (policy.is_offloaded or policy.is_replicated)),
    ]
    gpus = policy.data * policy.tensor * policy.stages
    contexts = [n for n in (2, 4, 8) if n > policy.context and policy.data % n == 0 and policy.allows_context(n)]
    factors = [2**n for n in range(1, 11) if gpus * 2**n <= MAX_GPUS]
    return [
        shares,
        passes,
        *([Cure(f"++{memory.backend_key}.{text}", "policy", values)] for text, values, helps in switches if helps),
        engines,
        [Cure(f"++{memory.backend_key}.context_parallel_size={n}", "policy", {"context": n}) for n in contexts],
        [Cure(f"{gpus * n} GPUs for the policy", "policy", {"data": policy.data * n}) for n in factors],
    ]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    title: str
    lines: Sequence[str] = ()
    problems: Sequence[str] = ()  # parts that do not fit, then the nearest cure

    def __str__(self) -> str:
        verdict = self.problems or (("everything fits",) if self.lines else ())
        return "\n".join([f"# memory: {self.title}", *(f"#   {line}" for line in (*self.lines, *verdict))])

    def log_problems(self) -> None:
        """Warn of what does not fit, at the start of a run."""
        if self.problems:
            logger.warning("%s: %s", self.title, "; ".join(self.problems))


def memory_plan(config: AnyTrainingConfig, layout: Layout) -> MemoryPlan:
    """Return the plan of a training run on the devices of `layout`."""
    try:
        return _plan_gpus(config, layout) if layout.device == "cuda" else _plan_cpu(config, layout)
    except UnknownShapeError as error:
        return MemoryPlan(f"unknown: {error}")


def sampling_memory_plan(*configs: SampledRunConfig, device: Device = "cuda") -> MemoryPlan:
    """Return the plan of engines that only sample, one after the other, on `device`: collections and evaluations."""
    if configs[0].server.address is not None:
        return MemoryPlan("the server's own")
    try:
        return _plan_sampling_on_cpu(configs) if device == "cpu" else _plan_sampling_on_gpus(configs)
    except UnknownShapeError as error:
        return MemoryPlan(f"unknown: {error}")


def _plan_sampling_on_gpus(configs: Sequence[SampledRunConfig]) -> MemoryPlan:
    server = configs[0].server
    capacity, title = _capacity(configs[0])
    lines, problems = [], []
    for config in configs:
        shape = find_shape("policy.model_name", config.policy.model_name)
        engine = EngineMemory(
            shape=shape,
            utilization=server.gpu_memory_utilization,
            gpus=server.tensor_parallel_size,
            weight_bytes=_bytes_of(config.policy.precision),
            max_model_len=server.max_model_len or config.policy.max_total_sequence_length,
        )
        lines.append(str(Moment(shape.name, engine.awake(capacity))))
        if (problem := engine.problem(capacity)) is not None:
            gpus = engine.gpus * 2 ** math.ceil(math.log2(engine.smallest / (engine.utilization * capacity)))
            problems += [f"does not fit: {problem}", f"nearest cure: ++server.tensor_parallel_size={gpus}"]
    return MemoryPlan(title, lines, problems)


def _plan_sampling_on_cpu(configs: Sequence[SampledRunConfig]) -> MemoryPlan:
    lines, problems = [], []
    for config in configs:
        shape = find_shape("policy.model_name", config.policy.model_name)
        weights = _bytes_of(config.policy.precision) * shape.parameters
        moment = Moment(shape.name, {"weights": weights, "engine": CPU_CACHE_BYTES, "processes": PROCESS_BYTES})
        lines.append(str(moment))
        problems += _host_problems("sampling", moment)
    return MemoryPlan("expected peak of the host", lines, problems)


def _host_problems(what: str, moment: Moment) -> list[str]:
    """Return why something does not fit into this machine's memory; nothing if it does."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = f"{what} needs {moment.total / GB:.1f} of the {total / GB:.0f} GB of this machine"
    return [f"does not fit: {needed}"] if moment.total > total else []


def reward_model_memory_plan(config: RewardModelRunConfig) -> MemoryPlan:
    """Return the plan of a reward model: one process, float32 weights, a pair's two sides in each micro-batch."""
    policy = config.policy
    try:
        shape = find_shape("policy.model_name", policy.model_name)
    except UnknownShapeError as error:
        return MemoryPlan(f"unknown: {error}")
    model = RankMemory(
        shape=replace(shape, is_tied=True),
        compute_bytes=_bytes_of(policy.precision),
        train_tokens=2 * policy.train_micro_batch_size * policy.max_total_sequence_length,
        optimizer_bytes=_optimizer_bytes(policy.optimizer.name),
    )
    parts = {**_training_parts([model]), "process": PROCESS_BYTES}
    return MemoryPlan("expected peak of the one device, or of the host on a CPU", [str(Moment("training", parts))])


def _plan_gpus(config: AnyTrainingConfig, layout: Layout) -> MemoryPlan:
    capacity, title = _capacity(config)
    memory = make_run_memory(config, layout, capacity)
    lines = [f"{device}, {moment}" for device, moments in memory.devices().items() for moment in moments]
    problems = [f"does not fit: {problem}" for problem in memory.problems()]
    if problems:
        problems.append(f"nearest cure: {find_cure(memory)}")
    return MemoryPlan(title, [*lines, f"each node, {memory.host()}"], problems)


def _plan_cpu(config: AnyTrainingConfig, layout: Layout) -> MemoryPlan:
    memory = make_run_memory(config, layout, capacity=0)
    policy, engine, num_ranks = memory.policy, memory.engine, len(layout.ranks)
    parts = {
        "processes": PROCESS_BYTES * (1 + (num_ranks if layout.needs_cluster else 0)),
        **_training_parts([policy] * num_ranks),
        "reference": num_ranks * policy.reference,
        "logits": num_ranks * policy.gathered,
        "teachers": sum(model.weights for model in memory.teachers.values()),
    }
    if engine is not None:
        own_process = PROCESS_BYTES // 2 if engine.has_own_process else 0
        parts["engines"] = len(layout.engines) * (engine.weights + CPU_CACHE_BYTES + own_process)
    moment = Moment("training", parts)
    return MemoryPlan("expected peak of the host", [str(moment)], _host_problems("training", moment))


def _training_parts(ranks: Sequence[RankMemory]) -> dict[str, int]:
    names = ("weights", "gradients", "optimizer", "activations")
    return {name: sum(getattr(rank, name) for rank in ranks) for name in names}


def _capacity(config: AnyTrainingConfig | SampledRunConfig) -> tuple[int, str]:
    """Return the bytes of a GPU, and the title of its plan, which says where they come from."""
    capacity, source = DEFAULT_CAPACITY, "assumed: this machine has no GPU, and cluster.gpu_memory_gb is not set"
    if config.cluster.gpu_memory_gb is not None:
        capacity, source = int(config.cluster.gpu_memory_gb * GB), "cluster.gpu_memory_gb"
    elif (detected := device_memory()) is not None:
        capacity, source = detected, "detected"
    return capacity, f"expected peaks of each GPU of {capacity / GB:.0f} GB ({source})"


def make_run_memory(config: AnyTrainingConfig, layout: Layout, capacity: int) -> RunMemory:
    """Return the models of a run on devices of `capacity` bytes; raises UnknownShapeError."""
    policy, nodes = config.policy, max(layout.num_nodes, 1)
    memory = RunMemory(
        capacity=capacity,
        policy=_policy_memory(config, layout, capacity),
        ranks_per_node=math.ceil(len(layout.ranks) / nodes),
        saves=config.checkpointing.enabled,
        saves_whole_model=_saves_whole_model(policy.parallelism),
        backend_key=f"policy.{policy.backend_key}",
        **_micro_batch_keys(config),
    )
    if isinstance(config, SupervisedRunConfig):
        return memory
    sections = {key: config.teacher_sections[key] for key in layout.teachers}
    shared_teachers = frozenset(key for key, section in sections.items() if section.colocated.enabled)
    # A reward model in the trainer's process is on the policy's device, and no part of this plan.
    has_scorer_beside = any(
        isinstance(scorer, ModelScorerConfig) and not scorer.in_actor and scorer.device != "cpu"
        for scorer in config.scorers.values()
    )
    must_take_turns = bool(shared_teachers) or config.reward_model.shares_device or has_scorer_beside
    return replace(
        memory,
        engine=_engine_memory(config, memory.policy.shape, layout),
        teachers={
            key: _teacher_memory(key, each, len(layout.teachers[key]), capacity) for key, each in sections.items()
        },
        shares_device=not layout.is_split,
        offload="always" if must_take_turns and policy.offload == "auto" else policy.offload,
        shared_teachers=shared_teachers,
        engines_per_node=math.ceil(len(layout.engines) / nodes),
    )


def _micro_batch_keys(config: AnyTrainingConfig) -> dict[str, Any]:
    """Return the keys that set the tokens of a pass, and what one unit of them is."""
    policy = config.policy
    for name in ("sequence_packing", "dynamic_batching"):
        if getattr(policy, name).enabled:
            keys = (f"policy.{name}.train_mb_tokens", f"policy.{name}.logprob_mb_tokens")
            return {"micro_batch_keys": keys, "tokens_per_unit": policy.ranks_per_limit}
    rows = config.rows_per_sample if isinstance(config, SupervisedRunConfig) else 1
    tokens_per_unit = rows * policy.max_total_sequence_length
    return {"micro_batch_keys": ("policy.train_micro_batch_size",), "tokens_per_unit": tokens_per_unit}


def _saves_whole_model(section: BackendConfig) -> bool:
    lora = section.adapter_section
    return lora is None or lora.save_merged


def _policy_memory(config: AnyTrainingConfig, layout: Layout, capacity: int) -> RankMemory:
    policy, section, longest = config.policy, config.policy.parallelism, config.policy.max_total_sequence_length
    if isinstance(config, SupervisedRunConfig):
        rows, score_rows = config.rows_per_sample, config.val_micro_batch_size
    else:
        rows, score_rows = 1, policy.logprob_batch_size or policy.train_micro_batch_size
    model, ranks = _rank_memory("policy", policy, len(layout.ranks)), policy.ranks_per_limit
    reduction_on = getattr(section, "reduction_on", None)  # Megatron's
    model = replace(
        model,
        train_tokens=ranks * _tokens(policy, policy.train_micro_batch_size * rows, "train_mb_tokens", longest),
        score_tokens=ranks * _tokens(policy, score_rows, "logprob_mb_tokens", longest),
        longest=longest,
        recomputes=getattr(section, "activation_checkpointing", False),
        is_offloaded=getattr(section, "cpu_offload", False),
        adapter_dim=section.adapter_dim,
        **_adapter_counts(config),
        optimizer_bytes=_optimizer_bytes(policy.optimizer.name),
        has_reference=config.needs_reference,
        is_optimizer_whole=reduction_on is not None and not reduction_on(layout.device, model.data).divides_optimizer,
    )
    return _keep_whole(model, section, capacity)


def _adapter_counts(config: AnyTrainingConfig) -> dict[str, int]:
    """Return the numbers of adapters, and of those that are trained, in a run of several policies."""
    if not isinstance(config, GRPORunConfig) or not config.policies:
        return {}
    return {"num_adapters": len(config.policies), "num_trained_adapters": len(config.losses)}


def _teacher_memory(key: str, section: TeacherConfig, num_ranks: int, capacity: int) -> RankMemory:
    tokens = _tokens(section, section.logprob_batch_size, "logprob_mb_tokens", 1)
    model = replace(
        _rank_memory(key, section, num_ranks),
        score_tokens=tokens,
        is_frozen=True,
        is_offloaded=getattr(section.parallelism, "cpu_offload", False),
    )
    return _keep_whole(model, section.parallelism, capacity)


def _keep_whole(model: RankMemory, section: Section, capacity: int) -> RankMemory:
    """Return the memory of a model whose section may keep whole weights between passes (`keep_unsharded`)."""
    kept = getattr(section, "keep_unsharded", False)
    if kept == "auto":
        kept = not model.is_offloaded and model.whole_bytes <= KEPT_SHARE * capacity
    return replace(model, is_kept_whole=kept)


def _rank_memory(key: str, model: PolicyConfig | TeacherConfig, num_ranks: int) -> RankMemory:
    shape = find_shape(f"{key}.model_name", model.model_name, model.hf_config_overrides)
    data, context = max(num_ranks // model.model_parallel_size, 1), model.context_parallel_size
    experts = model.parallelism.experts_on(data, key=f"{key}.{model.backend_key}")
    return RankMemory(
        shape=shape,
        compute_bytes=_bytes_of(model.precision),
        data=data * context,
        context=context,
        splits_residual=model.parallelism.splits_residual and not shape.num_experts,
        tensor=model.tensor_parallel_size,
        stages=model.pipeline_parallel_size,
        experts=experts.parallel,
        expert_tensor=experts.tensor,
        chunk=resolve_chunk_size(model.logprob_chunk_size, shape.vocab_size),
        is_replicated=not model.parallelism.SPLITS_STATE,
    )


def _engine_memory(config: TrainingRunConfig, shape: ModelShape, layout: Layout) -> EngineMemory:
    beside_training = config.algorithm.samples_beside_training
    section = config.policy.generation.for_layout(layout, samples_beside_training=beside_training)
    options = getattr(section, "vllm_cfg", None)
    return EngineMemory(
        shape=shape,
        utilization=getattr(options, "gpu_memory_utilization", 0.0),
        gpus=section.gpus_per_engine,
        weight_bytes=_bytes_of(section.dtype(config.policy.precision)),
        max_model_len=section.max_model_len or config.policy.max_total_sequence_length,
        can_sleep=section.can_sleep,
        has_own_process=not section.shares_process,
    )


def _tokens(model: PolicyConfig | TeacherConfig, num_samples: int, key: str, longest: int) -> int:
    for section in (model.sequence_packing, model.dynamic_batching):
        if section.enabled:
            return getattr(section, key) or num_samples * longest
    return num_samples * longest


def _optimizer_bytes(name: str) -> int:
    return OPTIMIZER_BYTES.get(name.rpartition(".")[2], ADAM_BYTES)


def _bytes_of(precision: str) -> int:
    return 2 if precision == "bfloat16" else 4
