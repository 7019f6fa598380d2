"""Policy, engines and teachers, in this process or on the nodes and GPUs of a cluster, as the layout requires; and the
placement plan that --dry-run prints."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.distillation import Teachers
from nemo_rl.algorithms.run import Placement
from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.layout import DeviceSlot, Layout, make_layout, make_policy_layout
from nemo_rl.config.master import DistillationRunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import ParallelModelConfig, PolicyConfig
from nemo_rl.config.supervised import SupervisedRunConfig
from nemo_rl.distributed.devices import ALL_DEVICES, choose_device
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.interfaces import Generation, Policy
from nemo_rl.launch.rollouts import Inputs, runner_sections
from nemo_rl.launch.teachers import open_teachers
from nemo_rl.policy.driver import LocalPolicy, PolicyWorkerGroup
from nemo_rl.policy.hf_model import load_config
from nemo_rl.policy.offload import MeasureRoom
from nemo_rl.policy.ranks import bytes_of_step
from nemo_rl.policy.truncation import make_truncation
from nemo_rl.weight_sync.transports import choose_transport

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import Reservation, ReservedSlot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workers:
    policy: Policy
    generation: Generation
    placement: Placement  # takes turns on shared CUDA devices
    teachers: Teachers | None  # None: the algorithm uses none


def find_layout(config: TrainingRunConfig | SupervisedRunConfig) -> Layout:
    """Return the layout on the device that the installed engine can use; raises ConfigError.

    With `policy.device: cuda` this machine needs no CUDA device where a cluster has them.
    """
    engine_devices = ALL_DEVICES if isinstance(config, SupervisedRunConfig) else config.policy.generation.devices
    wanted = config.policy.device
    device = choose_device("auto", engine_devices) if wanted == "auto" else wanted
    if isinstance(config, SupervisedRunConfig):
        layout = make_policy_layout(config.policy, config.cluster, device)
    else:
        layout = make_layout(config, device)
        choose_transport(config.weight_sync.transport, layout)
    if not layout.needs_cluster:
        choose_device(device, engine_devices)
    return layout


def check_engine_build(config: TrainingRunConfig, layout: Layout) -> None:
    """Raise ConfigError where the installed engine cannot run on the layout's device, wherever that is."""
    choose_device(layout.device, config.policy.generation.devices, is_remote=True)


def check_model(policy: PolicyConfig, model_path: str) -> None:
    """Raise ConfigError for a model that cannot be split or adapted as the configuration asks; needs no weights."""
    model_config = load_config(model_path, policy.hf_config_overrides)
    policy.parallelism.check_model(model_config, key=f"policy.{policy.backend_key}")


async def open_policy(
    config: SupervisedRunConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    layout: Layout,
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> Policy:
    """Start the policy's workers without engines; otherwise as `open_workers`."""
    section = config.policy.model_copy(update={"logprob_batch_size": config.val_micro_batch_size})
    arguments = {
        "model_path": model_path,
        "temperature": 1.0,
        "needs_reference": config.needs_reference,
        "num_samples_per_step": section.train_global_batch_size,
        "seed": config.algorithm.seed,
        "tokenizer": tokenizer,
    }
    reservation = await _open_cluster(config, layout, stack)
    rank_config = config.model_copy(update={"policy": section})
    return await _open_ranks(rank_config, layout, reservation, arguments, log_dir=log_dir, stack=stack)


async def open_workers(
    config: TrainingRunConfig,
    inputs: Inputs,
    model_path: str,
    teacher_paths: Mapping[str, str],
    layout: Layout,
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> Workers:
    """Start policy, engines and teachers; takes seconds. `stack` closes them, and raises WorkerError when a worker dies
    in between."""
    arguments = {
        "model_path": model_path,
        "temperature": config.policy.generation.temperature,
        "truncation": make_truncation(config.policy.generation),
        "needs_reference": config.needs_reference,
        "num_samples_per_step": config.algorithm.num_samples_per_step,
        "seed": config.seed,
        "tokenizer": inputs.tokenizer,
    }
    reservation = await _open_cluster(config, layout, stack)
    teachers = await open_teachers(config, teacher_paths, layout, reservation, log_dir=log_dir, stack=stack)
    slots = [] if reservation is None else [reservation.slot(slot) for slot in layout.engines]
    start_engines = partial(_open_generation, config, model_path, layout, slots)
    async with _started(start_engines, at_once=layout.is_split) as starting:
        policy = await _open_ranks(config, layout, reservation, arguments, log_dir=log_dir, stack=stack)
        generation = await starting()
    stack.push_async_callback(generation.close)
    teacher_slots = teachers.by_key.values() if teachers else ()
    placement = Placement(
        policy,
        generation,
        shares_device=await _takes_turns(config, layout, policy, has_teachers=teachers is not None),
        teachers_share_device=layout.device == "cuda"
        and any(teacher.shares_policy_device for teacher in teacher_slots),
    )
    return Workers(policy, generation, placement, teachers)


def join_cluster(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> None:
    """Join or start the cluster that the layout needs, with an object store for the batches of a step.

    Call it before anything else of the run connects: a cluster that is joined keeps its size.
    """
    if layout.needs_cluster:
        from nemo_rl.distributed.cluster import connect  # loads Ray

        size = _bytes_of_step(config)
        connect(config.cluster.address, object_store_bytes=size, env_vars=config.cluster.environment)


async def _open_cluster(
    config: TrainingRunConfig | SupervisedRunConfig, layout: Layout, stack: AsyncExitStack
) -> "Reservation | None":
    """Join or start a cluster and reserve what the layout needs, released with `stack`; None: one process is enough."""
    if not layout.needs_cluster:
        return None
    from nemo_rl.distributed.cluster import cluster_address, reserve  # loads Ray

    join_cluster(config, layout)
    reservation = await reserve(
        layout,
        timeout_s=config.cluster.placement_limit_s,
        may_grow=cluster_address(config.cluster.address) is not None,
    )
    stack.callback(reservation.release)
    return reservation


def _bytes_of_step(config: TrainingRunConfig | SupervisedRunConfig) -> int:
    """Return what a step's batches and scores take in the cluster's object store."""
    if isinstance(config, SupervisedRunConfig):
        num_samples = config.policy.train_global_batch_size * config.rows_per_sample
    else:
        num_samples = config.algorithm.num_samples_per_step
    topk = config.distillation.topk_logits_k if isinstance(config, DistillationRunConfig) else 0
    return bytes_of_step(num_samples, config.policy.max_total_sequence_length, topk=topk)


async def _open_ranks(
    config: TrainingRunConfig | SupervisedRunConfig,
    layout: Layout,
    reservation: "Reservation | None",
    arguments: dict[str, Any],
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> Policy:
    """Start the policy, in this process or as one worker per rank of a cluster.

    `stack` ends the workers. From here to its end the death of a worker cancels the current task with WorkerError.
    """
    if reservation is None:
        policy = LocalPolicy(config.policy, **arguments)
        stack.push_async_callback(policy.close)
        return policy

    group = await PolicyWorkerGroup.create(
        config.policy.model_copy(update={"device": layout.device}),
        slots=[reservation.slot(slot) for slot in layout.ranks],
        timeout_s=config.cluster.start_limit_s(arguments["model_path"]),
        log_dir=log_dir,
        **arguments,
    )
    stack.push_async_callback(group.close)
    await stack.enter_async_context(group.cancel_task_on_worker_death())
    pids = ", ".join(map(str, await group.pids()))
    logger.info("%d policy ranks are ready (processes %s), their output in %s", group.num_ranks, pids, log_dir)
    return group


@asynccontextmanager
async def _started(
    start: Callable[[], Coroutine[Any, Any, Generation]], *, at_once: bool
) -> AsyncIterator[Callable[[], Awaitable[Generation]]]:
    """Yield a function that returns the engines; with `at_once` they start now, beside what the block does.

    On devices that policy and engines share they start after the policy: each measures the memory that is left. Where
    the block fails, the start is cancelled, and engines that have started are closed.
    """
    if not at_once:
        yield start
        return
    task = asyncio.ensure_future(start())

    async def wait() -> Generation:
        return await task

    try:
        yield wait
    except BaseException:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(outcome, BaseException):
            await outcome.close()
        raise


def engine_dtype(config: TrainingRunConfig) -> str:
    """Return the precision in which the engines compute."""
    return config.policy.generation.dtype(config.policy.precision)


async def _open_generation(
    config: TrainingRunConfig, model_path: str, layout: Layout, slots: "Sequence[ReservedSlot]"
) -> Generation:
    beside_training = config.algorithm.samples_beside_training
    section = config.policy.generation.for_layout(layout, samples_beside_training=beside_training)
    length = section.max_model_len or config.policy.max_total_sequence_length
    model = EngineModel(model_path, engine_dtype(config), length, layout.device)
    return await make_generation(section, model, slots=slots, start_timeout_s=config.cluster.start_limit_s(model_path))


def _shares_device(config: TrainingRunConfig, layout: Layout) -> bool:
    """Return whether policy and engine share a CUDA device: they are not split, and the engine may sleep."""
    return config.policy.generation.can_sleep and not layout.is_split and layout.device == "cuda"


async def _takes_turns(config: TrainingRunConfig, layout: Layout, policy: Policy, *, has_teachers: bool) -> bool:
    """Return whether policy and engine leave a shared device to each other: `policy.offload`.

    Teachers and reward models on that device need what the two leave. Measured once both are there.
    """
    if not _shares_device(config, layout) or config.policy.offload == "never":
        return False
    if config.policy.offload == "always" or has_teachers or config.reward_model.shares_device:
        return True
    room = await policy.run_with_weights(MeasureRoom())
    splits_state = config.policy.parallelism.SPLITS_STATE
    fits = room.holds_training(len(layout.ranks) if splits_state else config.policy.model_parallel_size)
    logger.info(
        "%.1f of %.1f GB are free beside policy and engine: %s (policy.offload)",
        room.free_bytes / 1e9,
        room.total_bytes / 1e9,
        "both stay on the device" if fits else "they take turns on the device",
    )
    return not fits


def placement_plan(config: TrainingRunConfig | SupervisedRunConfig) -> str:
    """Return one line per part of the run: its name, where it runs, in which precision; raises ConfigError."""
    layout = find_layout(config)
    lines = _policy_lines(config, layout)
    if isinstance(config, TrainingRunConfig):
        lines += _rollout_lines(config, layout)
    elif config.needs_reference:
        lines.append(f"#   reference policy: {_describe_reference(config)}")
    return "\n".join(lines)


def _rollout_lines(config: TrainingRunConfig, layout: Layout) -> list[str]:
    return [
        f"#   reference policy: {_describe_reference(config)}",
        *(f"#   {key}: {_describe_teacher(key, config, layout)}" for key in config.teacher_sections),
        f"#   generation: {_describe_engines(config, layout)}, {engine_dtype(config)}",
        *_environment_lines(config),
        f"#   weight sync: {choose_transport(config.weight_sync.transport, layout).replace('_', ' ')}",
    ]


def collection_placement_plan(*configs: SampledRunConfig) -> str:
    """Return the plan of collections of one model each that differ in nothing else; nothing is trained."""
    config = configs[0]
    models = ", then ".join(each.policy.model_name for each in configs)
    lines = [
        "# placement",
        f"#   model{'s' if len(configs) > 1 else ''}: {models}",
        f"#   generation: {_describe_server(config)}",
        *_environment_lines(config),
    ]
    return "\n".join(lines)


def _describe_server(config: SampledRunConfig) -> str:
    server = config.server
    if server.address is not None:
        return f"{server.model or 'the one model'} served at {', '.join(server.addresses)}, api: {server.api}"
    copies = {"tensor parallel": server.tensor_parallel_size, "data parallel": server.data_parallel_size}
    split = [f"{size} {name}" for name, size in copies.items() if size > 1]
    device = choose_device(config.policy.device, server.engine(config.policy.generation).devices)
    parts = [f"{server.backend} on {device}", "started by the driver", *split]
    return ", ".join([*parts, config.policy.precision])


def _environment_lines(config: RolloutRunConfig) -> list[str]:
    agents = sorted(name for name, section in runner_sections(config).items() if not section.has_stack)
    return [
        f"#   environments: {', '.join(sorted(config.env.keys() - set(agents))) or 'none'}",
        *([f"#   agents: {', '.join(agents)}; gateway on {config.gateway.host}"] if agents else []),
    ]


def _policy_lines(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> list[str]:
    model = (
        f"{config.policy.model_name}, {_describe_ranks(config.policy, layout, layout.ranks)}, {config.policy.precision}"
    )
    return [
        "# placement",
        *([f"#   cluster: {_describe_cluster(config, layout)}"] if layout.needs_cluster else []),
        f"#   policy: {model}{_describe_adapters(config)}",
    ]


def _describe_adapters(config: TrainingRunConfig | SupervisedRunConfig) -> str:
    adapters = config.policy.parallelism.adapters
    return f", {adapters}" if adapters else ""


def _describe_reference(config: TrainingRunConfig | SupervisedRunConfig) -> str:
    if not config.needs_reference:
        return "none (no KL penalty)"
    return "the policy without its adapters" if _describe_adapters(config) else "a frozen copy beside the policy"


def _describe_cluster(config: TrainingRunConfig | SupervisedRunConfig, layout: Layout) -> str:
    gpus = f" with {layout.gpus_per_node} GPUs each" if layout.gpus_per_node else ""
    where = f"Ray at {config.cluster.address}" if config.cluster.address else "Ray, of RAY_ADDRESS or local"
    return f"{where}, {_pluralize(layout.num_nodes, 'node')}{gpus}"


def _describe_ranks(model: ParallelModelConfig, layout: Layout, slots: Sequence[DeviceSlot]) -> str:
    """Return e.g. "Megatron, 4 ranks (1 data x 2 pipeline x 2 tensor parallel) on cpu"."""
    parallelism = model.parallelism
    text = f"{parallelism.title}, {_pluralize(len(slots), 'rank')}"
    if model.model_parallel_size > 1:
        stages = f"{model.pipeline_parallel_size} pipeline x " if parallelism.PIPELINE_PARALLEL_KEY else ""
        data = len(slots) // model.model_parallel_size
        text += f" ({data} data x {stages}{model.tensor_parallel_size} tensor parallel)"
    return f"{text} on {_format_devices(layout, slots)}"


def _describe_teacher(key: str, config: TrainingRunConfig, layout: Layout) -> str:
    section = config.teacher_sections[key]
    if section.server is not None:
        return f"{section.server.model} served at {', '.join(section.server.base_urls)}"
    shared = ", in turns with the policy" if layout.device == "cuda" and section.colocated.enabled else ""
    return (
        f"{section.model_name}, {_describe_ranks(section, layout, layout.teachers[key])}{shared}, {section.precision}"
    )


def _describe_engines(config: TrainingRunConfig, layout: Layout) -> str:
    section = config.policy.generation
    if section.runs_in_driver or not (section.in_actor or layout.needs_cluster):
        return f"{section.backend} on {layout.device}, started by the driver"
    if not layout.needs_cluster:
        return f"{section.backend} on {layout.device}, in a Ray actor"
    count = _pluralize(len(layout.engines), "engine")
    shared = "" if layout.is_split or layout.device == "cpu" else ", shared with the policy"
    return f"{section.backend}, {count} on {_format_devices(layout, layout.engines)}{shared}"


def _format_devices(layout: Layout, slots: Sequence[DeviceSlot]) -> str:
    """Return e.g. "cuda: node 0 GPUs 0 1; node 1 GPU 0"; without a cluster the device only."""
    if not layout.needs_cluster:
        return layout.device
    nodes: list[str] = []
    for node, on_node in groupby(slots, key=lambda slot: slot.node):
        gpus = [str(gpu) for slot in on_node for gpu in slot.gpus]
        nodes.append(f"node {node}" + (f" GPU{'s' if len(gpus) > 1 else ''} {' '.join(gpus)}" if gpus else ""))
    return f"{layout.device}: {'; '.join(nodes)}"


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
