"""Policy, engines and teachers, in this process or on the nodes and GPUs of a cluster, as the layout requires."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.teacher_stages import Teachers
from nemo_rl.config.layout import Layout
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, TrainingRunConfig
from nemo_rl.config.policies import NamedPolicyConfig
from nemo_rl.config.supervised_runs import SupervisedRunConfig
from nemo_rl.distributed.vision_towers import sees
from nemo_rl.generation.engines import AdapterSlots, EngineModel, make_generation
from nemo_rl.interfaces import Generation, Policy
from nemo_rl.launch.memory_plan import make_run_memory
from nemo_rl.launch.model_files import adapter_directory
from nemo_rl.launch.resolved_model import ResolvedModel
from nemo_rl.launch.resolved_run import ResolvedRun
from nemo_rl.launch.teachers import open_teachers
from nemo_rl.observability.profiles import profile_directory
from nemo_rl.policy.batch_transfer import bytes_of_step
from nemo_rl.policy.driver import LocalPolicy, PolicyWorkerGroup
from nemo_rl.policy.memory import UnknownShapeError
from nemo_rl.policy.truncation import largest_recorded_set, make_truncation
from nemo_rl.weight_sync.adapters import num_live_versions

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import Reservation, ReservedSlot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workers:
    policy: Policy
    generation: Generation
    placement: Placement  # takes turns on shared CUDA devices
    teachers: Teachers | None  # None: the algorithm uses none


async def open_policy(
    config: SupervisedRunConfig, model: ResolvedModel, layout: Layout, *, log_dir: Path, stack: AsyncExitStack
) -> Policy:
    """Start the policy's workers without engines; otherwise as `open_workers`."""
    section = config.policy.model_copy(update={"logprob_batch_size": config.val_micro_batch_size})
    arguments = {
        "model_path": model.path,
        "temperature": 1.0,
        "needs_reference": config.needs_reference,
        "num_samples_per_step": section.train_global_batch_size,
        "seed": config.algorithm.seed,
        "tokenizer": model.tokenizer,
    }
    reservation = await _open_cluster(config, layout, stack)
    rank_config = config.model_copy(update={"policy": section})
    return await _open_ranks(rank_config, layout, reservation, arguments, log_dir=log_dir, stack=stack)


def _several_policies(config: GRPORunConfig) -> dict[str, NamedPolicyConfig]:
    """Return the table `policies` with the absolute directories of adapters: workers have another working directory."""
    found = {}
    for name, section in config.policies.items():
        path = None if section.adapter_path is None else str(adapter_directory(section.adapter_path).absolute())
        found[name] = section.model_copy(update={"adapter_path": path})
    return found


async def open_workers(run: ResolvedRun, *, log_dir: Path, stack: AsyncExitStack) -> Workers:
    """Start policy, engines and teachers; takes seconds.

    `stack` closes them, and raises WorkerError when a worker dies in between.
    """
    config, layout = run.config, run.layout
    arguments = {
        "model_path": run.policy.path,
        "temperature": config.policy.generation.temperature,
        "truncation": make_truncation(config.policy.generation),
        "needs_reference": config.needs_reference,
        "num_samples_per_step": config.algorithm.num_samples_per_step,
        "seed": config.seed,
        "tokenizer": run.policy.tokenizer,
        **({"policies": _several_policies(config)} if isinstance(config, GRPORunConfig) and config.policies else {}),
    }
    if layout.divides_cores:
        stack.enter_context(_half_of_cores())  # for models in this process; ranks of a cluster are told theirs
    reservation = await _open_cluster(config, layout, stack)
    teachers = await open_teachers(run, reservation, log_dir=log_dir, stack=stack)
    slots = [] if reservation is None else [reservation.slot(slot) for slot in layout.engines]
    profile_dir = profile_directory(config.logger.profile, log_dir.parent)
    start_engines = partial(_open_generation, config, run.policy, layout, slots, profile_dir)
    async with _started(start_engines, at_once=layout.is_split) as starting:
        policy = await _open_ranks(config, layout, reservation, arguments, log_dir=log_dir, stack=stack)
        generation = await starting()
    stack.push_async_callback(generation.close)
    teacher_slots = teachers.by_key.values() if teachers else ()
    takes_turns = await _takes_turns(config, layout, policy)
    placement = Placement(
        policy,
        generation,
        shares_device=takes_turns,
        stays_with_engine=layout.device == "cuda" and not layout.is_split and not takes_turns,
        teachers_share_device=layout.device == "cuda"
        and any(teacher.shares_policy_device for teacher in teacher_slots),
    )
    return Workers(policy, generation, placement, teachers)


@contextmanager
def _half_of_cores() -> Iterator[None]:
    """Let models that threads of this process make in the block compute on half of the cores, unless the user says."""
    usual = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usual // 2))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


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
    """Return the bytes of a step's batches and scores in the cluster's object store."""
    length = config.policy.max_total_sequence_length
    if isinstance(config, SupervisedRunConfig):
        return bytes_of_step(config.policy.train_global_batch_size * config.rows_per_sample, length)
    topk = config.distillation.topk_logits_k if isinstance(config, DistillationRunConfig) else 0
    set_size = largest_recorded_set(config.policy.generation)
    return bytes_of_step(config.algorithm.num_samples_per_step, length, topk=topk, set_size=set_size)


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
    section = config.policy.model_copy(update={"device": layout.device})
    if reservation is None:
        policy = LocalPolicy(section, **arguments)
        stack.push_async_callback(policy.close)
        return policy

    group = await PolicyWorkerGroup.create(
        section,
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

    On devices that policy and engines share they start after the policy: each measures the memory that is left. If
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


async def _open_generation(
    config: TrainingRunConfig,
    policy: ResolvedModel,
    layout: Layout,
    slots: "Sequence[ReservedSlot]",
    profile_dir: Path | None,
) -> Generation:
    assert policy.config is not None
    beside_training = config.algorithm.samples_beside_training
    section = config.policy.generation.for_layout(layout, samples_beside_training=beside_training)
    length = section.max_model_len or config.policy.max_total_sequence_length
    records = config.policy.router_replay.records
    model = EngineModel(
        policy.path,
        config.policy.engine_dtype,
        length,
        layout.device,
        divides_cores=layout.divides_cores,
        records_routes=records,
        adapters=_adapter_slots(config),
        vision_type=policy.config.model_type if sees(policy.config) else None,
        trace=config.logger.trace,
        profile_dir=profile_dir,
    )
    return await make_generation(section, model, slots=slots, start_timeout_s=config.cluster.start_limit_s(policy.path))


def _adapter_slots(config: TrainingRunConfig) -> AdapterSlots | None:
    dim = config.policy.parallelism.adapter_dim
    if dim is None or config.weight_sync.adapter != "separate":
        return None
    return AdapterSlots(dim, num_live_versions(config), config.policy_names)


async def _takes_turns(config: TrainingRunConfig, layout: Layout, policy: Policy) -> bool:
    """Return whether policy and engine leave a shared CUDA device to each other, by the memory plan for that device."""
    if layout.device == "cpu" or layout.is_split or not config.policy.generation.can_sleep:
        return False
    if config.policy.offload != "auto":
        return config.policy.offload == "always"
    capacity = await policy.device_bytes()
    try:
        takes_turns = make_run_memory(config, layout, capacity).takes_turns
    except UnknownShapeError as error:
        logger.info("policy and engine take turns on the device: %s", error)
        return True
    what = "take turns on the device" if takes_turns else "both stay on the device"
    logger.info("policy and engine %s, which has %.1f GB (policy.offload)", what, capacity / 1e9)
    return takes_turns
