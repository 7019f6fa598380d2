"""Teachers of a run: opened on their devices, validated, and the stage in which they score a batch."""

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nemo_rl.algorithms.cross_tokenizer_stage import CrossTokenizerStage
from nemo_rl.algorithms.teacher_stages import TeacherHandle, Teachers, TopKStage
from nemo_rl.config.environment import RolloutRunnerConfig
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.config.policy import TeacherConfig
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollout_dependencies import RolloutDependencies
from nemo_rl.interfaces import Teacher
from nemo_rl.launch.resolved_model import ResolvedModel
from nemo_rl.launch.resolved_run import ResolvedRun
from nemo_rl.launch.training_source import make_validator
from nemo_rl.losses.make import LossContext
from nemo_rl.policy.driver import LocalTeacher, TeacherWorkerGroup
from nemo_rl.policy.served_teacher import ServedTeacher

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import Reservation

logger = logging.getLogger(__name__)

REPORTED_METRICS = ("reward", "accuracy", "greedy_reward", "greedy_accuracy")


async def open_teachers(
    run: ResolvedRun, reservation: "Reservation | None", *, log_dir: Path, stack: AsyncExitStack
) -> Teachers | None:
    """Start the teachers, each off the policy's device until it is queried; None if the algorithm uses none.

    `stack` closes them.
    """
    if not run.teachers:
        return None
    by_key = {}
    for key, model in run.teachers.items():
        section = run.config.teacher_sections[key]
        shares_policy_device = section.server is None and section.colocated.enabled
        teacher = await _open_teacher(section, model, run, reservation, log_dir=log_dir, stack=stack)
        if shares_policy_device:
            await teacher.offload()
        by_key[key] = TeacherHandle(teacher, shares_policy_device, sees=model.encoder.images is not None)
    tasks = {task: key for task in run.config.env if (key := run.config.teacher_key(task)) is not None}
    return Teachers(by_key, tasks)


async def _open_teacher(
    section: TeacherConfig,
    model: ResolvedModel,
    run: ResolvedRun,
    reservation: "Reservation | None",
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> Teacher:
    key, config = model.key, run.config
    if section.server is not None:
        served = ServedTeacher(key, section.server)
        stack.push_async_callback(served.close)
        k = config.distillation.topk_logits_k if isinstance(config, DistillationRunConfig) else 0
        await served.check(k, num_tokens=2 if run.target_builders else config.policy.max_total_sequence_length)
        return served
    section = section.model_copy(update={"device": run.layout.device})
    arguments = {"section": key, "model_path": model.path, "temperature": config.policy.generation.temperature}
    if reservation is None:
        teacher = LocalTeacher(section, **arguments)
        stack.push_async_callback(teacher.close)
        return teacher

    slots = [reservation.slot(slot) for slot in run.layout.teachers[key]]
    group = await TeacherWorkerGroup.create(
        section, slots=slots, timeout_s=config.cluster.start_limit_s(model.path), log_dir=log_dir, **arguments
    )
    stack.push_async_callback(group.close)
    await stack.enter_async_context(group.cancel_task_on_worker_death())
    return group


async def validate_teachers(run: ResolvedRun, dependencies: RolloutDependencies) -> dict[str, float]:
    """Return `validation/teacher_<metric>` for each of REPORTED_METRICS that is configured: means over the teachers.

    Each teacher answers the prompts of its own tasks, sampled by the hf engine in this process; served teachers and the
    tasks of agents are excluded.
    """
    by_teacher: list[dict[str, float]] = []
    for key, model in run.teachers.items():
        section, prompt_sets = run.config.teacher_sections[key], _validation_prompts(key, run)
        if section.server is not None or not prompt_sets:
            continue
        from nemo_rl.generation.hf import HFGeneration  # loads transformers' models

        longest = run.config.policy.max_total_sequence_length
        engine = HFGeneration(model.path, dtype=section.precision, max_model_len=longest)
        try:
            environments, limits, scoring = dependencies.environments, dependencies.limits, dependencies.scoring
            own = RolloutDependencies(engine, environments, model.encoder, limits, scoring=scoring)
            validator = make_validator(run.config, prompt_sets, own)
            assert validator is not None
            metrics = (await validator.validate()).metrics
        finally:
            await engine.close()
        by_teacher.append({name: metrics[name] for name in REPORTED_METRICS if name in metrics})
        shown = ", ".join(f"{name} {value:.3f}" for name, value in by_teacher[-1].items())
        logger.info("%s (%s) on the validation set: %s", key, section.model_name, shown)
    return {
        f"validation/teacher_{name}": sum(each[name] for each in reporting_teachers) / len(reporting_teachers)
        for name in REPORTED_METRICS
        if (reporting_teachers := [each for each in by_teacher if name in each])
    }


def _validation_prompts(key: str, run: ResolvedRun) -> tuple[PromptSet, ...]:
    """Return the validation prompts of the teacher's tasks."""
    tasks = {
        task
        for task, section in run.config.env.items()
        if run.config.teacher_key(task) == key and not isinstance(section, RolloutRunnerConfig)
    }
    sets = (PromptSet(s.name, [p for p in s.prompts if p.task_name in tasks]) for s in run.validation)
    return tuple(one for one in sets if one.prompts)


def make_loss_context(run: ResolvedRun, config: DistillationRunConfig) -> LossContext:
    """Return what a distillation loss needs besides its section.

    Raises ConfigError if unmatched tokens count and differ between teachers of other tokenizers.
    """
    section = config.loss_fn.token_matching
    if section is None:
        return LossContext(is_on_policy=not config.distillation.off_policy)
    unmatched = [target_builder.token_map.student_unmatched for target_builder in run.target_builders.values()]
    differ = any(not np.array_equal(unmatched[0], other) for other in unmatched[1:])
    if section.matching == "identical" and section.unmatched_weight > 0 and differ:
        raise ConfigError(
            "loss_fn.cross_tokenizer.unmatched_weight",
            section.unmatched_weight,
            f"{', '.join(sorted(run.target_builders))} have vocabularies of their own, and each leaves other tokens "
            "unmatched; allowed: 0, or matching: prefix",
        )
    return LossContext(
        topk=min(config.distillation.topk_logits_k, run.policy.vocab_size),
        student_unmatched=torch.from_numpy(unmatched[0]),
    )


def make_teacher_stage(
    run: ResolvedRun, config: DistillationRunConfig, teachers: Teachers
) -> CrossTokenizerStage | TopKStage:
    """Return the stage that has the teachers score a batch: in tokens of their own tokenizers, or in the policy's."""
    k = config.distillation.topk_logits_k
    if run.target_builders:
        return CrossTokenizerStage(teachers, run.target_builders, k)
    return TopKStage(teachers, k, run.policy.vocab_size)
