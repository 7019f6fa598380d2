"""The memory plan as `--dry-run` prints it: from a configuration and its layout to comment lines.

A model's sizes come from its config.json where that is on this machine; the devices are those of the run: named by
`cluster.gpu_memory_gb`, detected, or assumed.
"""

import math
import os
from dataclasses import replace
from typing import Any

from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.layout import Layout, make_layout, make_policy_layout
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.policy import ParallelModelConfig, PolicyConfig, TeacherConfig, resolve_chunk_size
from nemo_rl.config.supervised import RewardModelRunConfig, SupervisedRunConfig
from nemo_rl.distributed.devices import device_memory
from nemo_rl.errors import ConfigError
from nemo_rl.launch.memory_plan import (
    ADAM_BYTES,
    GB,
    OPTIMIZER_BYTES,
    PROCESS_BYTES,
    EngineModel,
    Moment,
    RankModel,
    RunMemory,
    find_cure,
)
from nemo_rl.launch.model_files import ModelShape, UnknownShapeError, find_shape

KEPT_SHARE = 0.25  # of a device, where keep_unsharded is auto: policy/fsdp2/sharding.py
DEFAULT_CAPACITY = 80 * GB
CPU_CACHE_BYTES = 2**29  # of vLLM on a CPU: generation/vllm/engine.py, CPU_KV_CACHE_BYTES


def memory_plan(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> str:
    """Return the plan of a training run as comment lines, for the devices of `layout`.

    Where the run is on a CPU only because this machine has no GPU, the plan of GPUs follows.
    """
    try:
        if layout.device == "cuda":
            return _describe_gpus(config, layout)
        lines = _describe_cpu(make_run_memory(config, layout, capacity=0), layout)
        if config.policy.device != "auto" or config.cluster.gpus_per_node == 0:
            return lines
        if isinstance(config, SupervisedRunConfig):
            on_gpus = make_policy_layout(config.policy, config.cluster, "cuda")
        else:
            on_gpus = make_layout(config, "cuda")
        return f"{lines}\n{_describe_gpus(config, on_gpus)}"
    except UnknownShapeError as error:
        return f"# memory\n#   unknown: {error}"
    except ConfigError:  # of a layout on GPUs, which this run does not use
        return lines


def sampling_memory_plan(*configs: SampledRunConfig) -> str:
    """Return the plan of engines that only sample: collections and evaluations."""
    config = configs[0]
    server = config.server
    if server.address is not None:
        return "# memory: the server's own"
    capacity, source = _capacity(config)
    try:
        engines = [
            EngineModel(
                shape=find_shape("policy.model_name", each.policy.model_name),
                utilization=server.gpu_memory_utilization,
                gpus=server.tensor_parallel_size,
                weight_bytes=_bytes_of(each.policy.precision),
                max_model_len=server.max_model_len or each.policy.max_total_sequence_length,
            )
            for each in configs
        ]
    except UnknownShapeError as error:
        return f"# memory\n#   unknown: {error}"
    lines = [f"# memory: expected peaks of each GPU of {capacity / GB:.0f} GB ({source})"]
    for engine in engines:
        budget = int(engine.utilization * capacity)
        parts = {"engine weights": engine.weights, "KV cache and engine activations": budget - engine.weights}
        lines.append(f"#   {Moment(engine.shape.name, parts)}")
        if engine.smallest > budget:
            need = f"{engine.smallest / GB:.1f} GB for weights and one sequence, and has {budget / GB:.1f}"
            lines.append(f"#   does not fit: the engine needs {need}; nearest cure: server.tensor_parallel_size: "
                         f"{engine.gpus * 2 ** math.ceil(math.log2(engine.smallest / budget))}")  # fmt: skip
    return "\n".join(lines)


def reward_model_memory_plan(config: RewardModelRunConfig) -> str:
    """Return the plan of a reward model: one process, float32 weights, a pair's two sides in each micro-batch."""
    policy = config.policy
    try:
        shape = find_shape("policy.model_name", policy.model_name)
    except UnknownShapeError as error:
        return f"# memory\n#   unknown: {error}"
    tokens = 2 * policy.train_micro_batch_size * policy.max_total_sequence_length
    model = RankModel(
        shape=replace(shape, is_tied=True), compute_bytes=_bytes_of(policy.precision), train_tokens=tokens
    )
    parts = {
        "weights": model.weights,
        "gradients": model.gradients,
        "optimizer": OPTIMIZER_BYTES.get(policy.optimizer.name.rpartition(".")[2], ADAM_BYTES) * model.own_parameters,
        "activations": model.activations,
        "process": PROCESS_BYTES,
    }
    return f"# memory: expected peak of the one device, or of the host on a CPU\n#   {Moment('training', parts)}"


def _describe_gpus(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> str:
    capacity, source = _capacity(config)
    memory = make_run_memory(config, layout, capacity)
    lines = [f"# memory: expected peaks of each GPU of {capacity / GB:.0f} GB ({source})"]
    for device, moments in memory.devices().items():
        lines += [f"#   {device}, {moment}" for moment in moments]
    lines.append(f"#   each node, {memory.host()}")
    problems = memory.problems()
    lines += [f"#   does not fit: {problem}" for problem in problems]
    lines.append(f"#   nearest cure: {find_cure(memory)}" if problems else "#   everything fits")
    return "\n".join(lines)


def _describe_cpu(memory: RunMemory, layout: Layout) -> str:
    policy, engine, num_ranks = memory.policy, memory.engine, len(layout.ranks)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = {
        "processes": PROCESS_BYTES * (1 + (num_ranks if layout.needs_cluster else 0)),
        "weights": num_ranks * policy.weights,
        "gradients": num_ranks * policy.gradients,
        "optimizer": num_ranks * policy.optimizer,
        "reference": num_ranks * policy.reference,
        "activations": num_ranks * policy.activations,
        "logits": num_ranks * policy.training_gathered,
        "teachers": sum(model.weights for model in memory.teachers.values()),
    }
    if engine is not None:
        own_process = PROCESS_BYTES // 2 if engine.has_own_process else 0
        parts["engines"] = len(layout.engines) * (engine.weights + CPU_CACHE_BYTES + own_process)
    moment = Moment("training", parts)
    fits = f"does not fit into the {total / GB:.0f} GB of this machine" if moment.total > total else "fits"
    return f"# memory: expected peak of the host\n#   {moment}\n#   {fits}"


def _capacity(config: TrainingRunConfig | SupervisedRunConfig | SampledRunConfig) -> tuple[int, str]:
    if config.cluster.gpu_memory_gb is not None:
        return int(config.cluster.gpu_memory_gb * GB), "cluster.gpu_memory_gb"
    detected = device_memory()
    if detected is not None:
        return detected, "detected"
    return DEFAULT_CAPACITY, "assumed: this machine has no GPU, and cluster.gpu_memory_gb is not set"


# ---- from a configuration ----


def make_run_memory(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout, capacity: int) -> RunMemory:
    """Return the models of a run on devices of `capacity` bytes; raises UnknownShapeError."""
    policy = config.policy
    shape = find_shape("policy.model_name", policy.model_name, policy.hf_config_overrides)
    model = _policy_model(config, shape, len(layout.ranks), capacity)
    nodes = max(layout.num_nodes, 1)
    if isinstance(config, SupervisedRunConfig):
        return RunMemory(
            capacity=capacity,
            policy=model,
            ranks_per_node=math.ceil(len(layout.ranks) / nodes),
            saves=config.checkpointing.enabled,
        )
    teachers = {
        key: _teacher_model(key, config.teacher_sections[key], len(slots)) for key, slots in layout.teachers.items()
    }
    return RunMemory(
        capacity=capacity,
        policy=model,
        engine=_engine_model(config, shape, layout),
        teachers=teachers,
        shares_device=not layout.is_split,
        shared_teachers=frozenset(key for key in teachers if config.teacher_sections[key].colocated.enabled),
        ranks_per_node=math.ceil(len(layout.ranks) / nodes),
        engines_per_node=math.ceil(len(layout.engines) / nodes),
        saves=config.checkpointing.enabled,
    )


def _policy_model(
    config: TrainingRunConfig | SupervisedRunConfig, shape: ModelShape, num_ranks: int, capacity: int
) -> RankModel:
    policy, longest = config.policy, config.policy.max_total_sequence_length
    section = policy.parallelism
    dim = getattr(getattr(section, "lora_cfg", None), "dim", None) if section.adapters else None
    if isinstance(config, SupervisedRunConfig):
        rows, score_rows = config.rows_per_sample, config.val_micro_batch_size
    else:
        rows, score_rows = 1, policy.logprob_batch_size or policy.train_micro_batch_size
    model = RankModel(
        shape=shape,
        **_ranks(policy, num_ranks),
        compute_bytes=_bytes_of(policy.precision),
        train_tokens=_tokens(policy, policy.train_micro_batch_size * rows, "train_mb_tokens", longest),
        score_tokens=_tokens(policy, score_rows, "logprob_mb_tokens", longest),
        longest=longest,
        chunk=resolve_chunk_size(policy.logprob_chunk_size, shape.vocab_size),
        recomputes=getattr(section, "activation_checkpointing", False),
        is_offloaded=getattr(section, "cpu_offload", False),
        adapter_dim=dim,
        optimizer_bytes=OPTIMIZER_BYTES.get(policy.optimizer.name.rpartition(".")[2], ADAM_BYTES),
        has_reference=config.needs_reference,
    )
    kept = getattr(section, "keep_unsharded", False)
    if kept == "auto":
        whole = model.compute_bytes * model.own_parameters + 4 * model.trained_parameters
        kept = not model.is_offloaded and whole <= KEPT_SHARE * capacity
    return replace(model, is_kept_whole=kept)


def _teacher_model(key: str, section: TeacherConfig, num_ranks: int) -> RankModel:
    shape = find_shape(f"{key}.model_name", section.model_name, section.hf_config_overrides)
    tokens = _tokens(section, section.logprob_batch_size, "logprob_mb_tokens", 1)
    return RankModel(
        shape=shape,
        **_ranks(section, num_ranks),
        compute_bytes=_bytes_of(section.precision),
        score_tokens=tokens,
        chunk=resolve_chunk_size(section.logprob_chunk_size, shape.vocab_size),
        is_frozen=True,
    )


def _engine_model(config: TrainingRunConfig, shape: ModelShape, layout: Layout) -> EngineModel:
    beside_training = config.algorithm.samples_beside_training
    section = config.policy.generation.for_layout(layout, samples_beside_training=beside_training)
    options = getattr(section, "vllm_cfg", None)
    return EngineModel(
        shape=shape,
        utilization=getattr(options, "gpu_memory_utilization", 0.0),
        gpus=section.gpus_per_engine,
        weight_bytes=_bytes_of(section.dtype(config.policy.precision)),
        max_model_len=section.max_model_len or config.policy.max_total_sequence_length,
        sleeps=section.can_sleep,
        has_own_process=not section.shares_process,
    )


def _ranks(model: ParallelModelConfig, num_ranks: int) -> dict[str, Any]:
    tensor, stages = model.tensor_parallel_size, model.pipeline_parallel_size
    return {
        "data": max(num_ranks // (tensor * stages), 1),
        "tensor": tensor,
        "stages": stages,
        "is_replicated": model.backend_key == "megatron_cfg",
    }


def _tokens(model: PolicyConfig | TeacherConfig, num_samples: int, key: str, longest: int) -> int:
    for section in (model.sequence_packing, model.dynamic_batching):
        if section.enabled:
            return getattr(section, key) or num_samples * longest
    return num_samples * longest


def _bytes_of(precision: str) -> int:
    return 2 if precision == "bfloat16" else 4
