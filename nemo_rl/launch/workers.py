"""Policy, engines and teachers, in this process or on the nodes and GPUs of a cluster, as the layout asks."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.distillation import Teachers
from nemo_rl.algorithms.run import Placement
from nemo_rl.config.layout import Layout, make_layout, make_policy_layout
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.distributed.devices import ALL_DEVICES, choose_device
from nemo_rl.generation.engines import make_generation
from nemo_rl.interfaces import Generation, Policy
from nemo_rl.launch.rollouts import Inputs
from nemo_rl.launch.teachers import open_teachers
from nemo_rl.policy.hf_model import load_config
from nemo_rl.policy.local import LocalPolicy
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


def find_layout(config: TrainingRunConfig | SFTRunConfig) -> Layout:
    """Return the layout on the device that the installed engine can use; raises ConfigError.

    With `policy.device: cuda` this machine needs no CUDA device where a cluster has them.
    """
    engine_devices = ALL_DEVICES if isinstance(config, SFTRunConfig) else config.policy.generation.devices
    wanted = config.policy.device
    device = choose_device("auto", engine_devices) if wanted == "auto" else wanted
    if isinstance(config, SFTRunConfig):
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
    config: SFTRunConfig,
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
        "needs_reference": False,
        "num_samples_per_step": section.train_global_batch_size,
        "seed": config.sft.seed,
        "tokenizer": tokenizer,
    }
    reservation = await _open_cluster(config, layout, stack)
    rank_config = config.model_copy(update={"policy": section})
    policy, _ = await _open_ranks(rank_config, layout, reservation, arguments, log_dir=log_dir, stack=stack)
    return policy


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
        "needs_reference": config.needs_reference,
        "num_samples_per_step": config.algorithm.num_samples_per_step,
        "seed": config.seed,
        "tokenizer": inputs.tokenizer,
    }
    reservation = await _open_cluster(config, layout, stack)
    teachers = await open_teachers(config, teacher_paths, layout, reservation, log_dir=log_dir, stack=stack)
    policy, slots = await _open_ranks(config, layout, reservation, arguments, log_dir=log_dir, stack=stack)
    generation = await _open_generation(config, model_path, layout, slots)
    stack.push_async_callback(generation.close)
    teacher_slots = teachers.by_key.values() if teachers else ()
    placement = Placement(
        policy,
        generation,
        shares_device=_shares_device(config, layout),
        teachers_share_device=layout.device == "cuda"
        and any(teacher.shares_policy_device for teacher in teacher_slots),
    )
    return Workers(policy, generation, placement, teachers)


async def _open_cluster(
    config: TrainingRunConfig | SFTRunConfig, layout: Layout, stack: AsyncExitStack
) -> "Reservation | None":
    """Join or start a cluster and reserve what the layout needs, released with `stack`; None: one process is enough."""
    if not layout.needs_cluster:
        return None
    from nemo_rl.distributed.cluster import cluster_address, connect, reserve  # loads Ray

    connect(config.cluster.address)
    reservation = await reserve(
        layout,
        timeout_s=config.cluster.start_timeout_s,
        may_grow=cluster_address(config.cluster.address) is not None,
    )
    stack.callback(reservation.release)
    return reservation


async def _open_ranks(
    config: TrainingRunConfig | SFTRunConfig,
    layout: Layout,
    reservation: "Reservation | None",
    arguments: dict[str, Any],
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> "tuple[Policy, Sequence[ReservedSlot]]":
    """Start the policy, in this process or as one worker per rank of a cluster; return it with the engines' slots.

    `stack` ends the workers. From here to its end the death of a worker cancels the current task with WorkerError.
    """
    if reservation is None:
        policy = LocalPolicy(config.policy, **arguments)
        stack.push_async_callback(policy.close)
        return policy, ()
    from nemo_rl.policy.worker_group import PolicyWorkerGroup  # loads Ray

    group = await PolicyWorkerGroup.create(
        config.policy.model_copy(update={"device": layout.device}),
        slots=[reservation.slot(slot) for slot in layout.ranks],
        timeout_s=config.cluster.start_timeout_s,
        log_dir=log_dir,
        **arguments,
    )
    stack.push_async_callback(group.close)
    await stack.enter_async_context(group.cancel_task_on_worker_death())
    pids = ", ".join(map(str, await group.pids()))
    logger.info("%d policy ranks are ready (processes %s), their output in %s", group.num_ranks, pids, log_dir)
    return group, [reservation.slot(slot) for slot in layout.engines]


def engine_dtype(config: TrainingRunConfig) -> str:
    """Return the precision in which the engines compute."""
    return config.policy.generation.dtype(config.policy.precision)


async def _open_generation(
    config: TrainingRunConfig, model_path: str, layout: Layout, slots: "Sequence[ReservedSlot]"
) -> Generation:
    section = config.policy.generation
    return await make_generation(
        section,
        model_path=model_path,
        dtype=engine_dtype(config),
        max_model_len=section.max_model_len or config.policy.max_total_sequence_length,
        device=layout.device,
        slots=slots,
    )


def _shares_device(config: TrainingRunConfig, layout: Layout) -> bool:
    """Return whether policy and engine share a CUDA device: they are not split, and the engine may sleep."""
    return config.policy.generation.can_sleep and not layout.is_split and layout.device == "cuda"
