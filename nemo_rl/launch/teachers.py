"""Teachers from the configuration: checked against the policy before a model loads, opened on their devices, validated,
and aligned with the student where their tokenizer differs."""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.cross_tokenizer_targets import TokenMap
from nemo_rl.algorithms.distillation import CrossTokenizerStage, TeacherHandle, Teachers, TeacherTargetBuilder
from nemo_rl.config.checks import check_task_teachers, uses_cross_tokenizer, uses_teachers
from nemo_rl.config.environment import RolloutRunnerConfig
from nemo_rl.config.layout import Layout
from nemo_rl.config.master import DistillationRunConfig, TrainingRunConfig
from nemo_rl.config.policy import TeacherConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.datasets import PromptSet
from nemo_rl.data.token_alignment import Vocabulary
from nemo_rl.data.tokenizer import load_tokenizer_with_template
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollouts import RolloutDependencies
from nemo_rl.interfaces import Teacher
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.rollouts import Inputs, make_validator
from nemo_rl.losses.make import LossContext
from nemo_rl.policy.driver import LocalTeacher, TeacherWorkerGroup
from nemo_rl.policy.hf_model import load_config
from nemo_rl.policy.served_teacher import ServedTeacher

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import Reservation

logger = logging.getLogger(__name__)


async def resolve_teachers(config: TrainingRunConfig) -> dict[str, str]:
    """Return the path or hub name of each teacher's model, by key; the quickstart's is made on first use."""
    if not uses_teachers(config):
        return {}
    return {
        key: await resolve_model(section.model_name, key=f"{key}.model_name")
        for key, section in config.teacher_sections.items()
    }


def check_teachers_fit(config: TrainingRunConfig, inputs: Inputs, teacher_paths: Mapping[str, str]) -> None:
    """Raise ConfigError for a task without a teacher, and for a teacher that cannot be compared with the policy."""
    if not uses_teachers(config):
        return
    check_task_teachers(config, inputs.train.task_names)
    sizes = {} if uses_cross_tokenizer(config) else {"policy": inputs.vocab_size}
    for key, path in teacher_paths.items():
        section = config.teacher_sections[key]
        if not uses_cross_tokenizer(config):
            check_same_vocabulary(key, section, path, inputs.tokenizer)
        if section.server is None:
            model = load_config(path, section.hf_config_overrides, section=key)
            section.parallelism.check_model(model, key=f"{key}.{section.backend_key}")
            sizes[key] = model.get_text_config().vocab_size
            if not uses_cross_tokenizer(config):  # which drops what exceeds the teacher's context
                _check_context_length(key, section, model, config.policy.max_total_sequence_length)
    if isinstance(config, DistillationRunConfig):
        for key, size in sizes.items():
            if config.distillation.topk_logits_k > size:
                raise ConfigError(
                    "distillation.topk_logits_k",
                    config.distillation.topk_logits_k,
                    f"more tokens than {key}.model_name has; allowed: at most {size}",
                )


def _check_context_length(key: str, section: TeacherConfig, model: PreTrainedConfig, length: int) -> None:
    longest = getattr(model.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError(
            f"{key}.model_name",
            section.model_name,
            f"it takes {longest} tokens at most, and policy.max_total_sequence_length is {length}",
        )


def check_same_vocabulary(key: str, section: TeacherConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless every token has the same id in the teacher's tokenizer as in the policy's."""
    own = tokenizer.get_vocab()
    others = teacher_tokenizer(key, section, path).get_vocab()
    if own == others:
        return
    differing = min((token for token in own.keys() | others.keys() if own.get(token) != others.get(token)), default="")
    raise ConfigError(
        f"{key}.model_name",
        section.model_name,
        f"its tokenizer has another vocabulary than the policy's: {len(others)} and {len(own)} tokens, and e.g. "
        f"{differing!r} is {others.get(differing)} there and {own.get(differing)} here, while the loss compares tokens "
        "by their ids; allowed: a teacher with the policy's tokenizer, or, in examples/run_distillation.py, "
        "loss_fn.cross_tokenizer.enabled: true",
    )


def teacher_tokenizer(key: str, section: TeacherConfig, path: str) -> PreTrainedTokenizerBase:
    """Load the teacher's tokenizer; raises ConfigError under the teacher's key."""
    name_key = f"{key}.model_name" if section.tokenizer.name is None else f"{key}.tokenizer.name"
    return load_tokenizer_with_template(
        section.tokenizer.name or path,
        section.tokenizer.chat_template,
        name_key=name_key,
        template_key=f"{key}.tokenizer.chat_template",
    )


async def open_teachers(
    config: TrainingRunConfig,
    teacher_paths: Mapping[str, str],
    layout: Layout,
    reservation: "Reservation | None",
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> Teachers | None:
    """Start the teachers, each off the policy's device until it is queried; None where none is used. `stack` closes
    them."""
    if not teacher_paths:
        return None
    by_key = {}
    for key, path in teacher_paths.items():
        section = config.teacher_sections[key]
        shares_policy_device = section.server is None and section.colocated.enabled
        teacher = await _open_teacher(key, config, path, layout, reservation, log_dir=log_dir, stack=stack)
        if shares_policy_device:
            await teacher.offload()
        by_key[key] = TeacherHandle(teacher, shares_policy_device)
    tasks = {task: key for task in config.env if (key := config.teacher_key(task)) is not None}
    return Teachers(by_key, tasks)


async def _open_teacher(
    key: str,
    config: TrainingRunConfig,
    path: str,
    layout: Layout,
    reservation: "Reservation | None",
    *,
    log_dir: Path,
    stack: AsyncExitStack,
) -> Teacher:
    section = config.teacher_sections[key]
    if section.server is not None:
        served = ServedTeacher(key, section.server)
        stack.push_async_callback(served.close)
        k = config.distillation.topk_logits_k if isinstance(config, DistillationRunConfig) else 0
        await served.check(k, num_tokens=2 if uses_cross_tokenizer(config) else config.policy.max_total_sequence_length)
        return served
    section = section.model_copy(update={"device": layout.device})
    arguments = {"section": key, "model_path": path, "temperature": config.policy.generation.temperature}
    if reservation is None:
        teacher = LocalTeacher(section, **arguments)
        stack.push_async_callback(teacher.close)
        return teacher

    slots = [reservation.slot(slot) for slot in layout.teachers[key]]
    group = await TeacherWorkerGroup.create(
        section, slots=slots, timeout_s=config.cluster.start_limit_s(path), log_dir=log_dir, **arguments
    )
    stack.push_async_callback(group.close)
    await stack.enter_async_context(group.cancel_task_on_worker_death())
    return group


REPORTED_METRICS = ("accuracy", "greedy_accuracy")


async def validate_teachers(
    config: TrainingRunConfig, inputs: Inputs, dependencies: RolloutDependencies, teacher_paths: Mapping[str, str]
) -> dict[str, float]:
    """Return `validation/teacher_accuracy`, and the greedy one where configured: means over the teachers.

    Each teacher answers the prompts of its own tasks, sampled by the hf engine in this process; served teachers and the
    tasks of agents are excluded.
    """
    by_teacher: list[dict[str, float]] = []
    for key, path in teacher_paths.items():
        section, own = config.teacher_sections[key], _validation_prompts(key, config, inputs)
        if section.server is not None or not own:
            continue
        from nemo_rl.generation.hf import HFGeneration  # loads transformers' models

        encoder = ChatEncoder(
            teacher_tokenizer(key, section, path), chat_template_kwargs=section.tokenizer.chat_template_kwargs
        )
        engine = HFGeneration(path, dtype=section.precision, max_model_len=config.policy.max_total_sequence_length)
        try:
            environments, limits, scoring = dependencies.environments, dependencies.limits, dependencies.scoring
            own_dependencies = RolloutDependencies(engine, environments, encoder, limits, scoring=scoring)
            validator = make_validator(config, replace(inputs, validation=own), own_dependencies)
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


def _validation_prompts(key: str, config: TrainingRunConfig, inputs: Inputs) -> tuple[PromptSet, ...]:
    """Return the validation prompts of the teacher's tasks."""
    tasks = {
        task
        for task, section in config.env.items()
        if config.teacher_key(task) == key and not isinstance(section, RolloutRunnerConfig)
    }
    sets = (PromptSet(s.name, [p for p in s.prompts if p.task_name in tasks]) for s in inputs.validation)
    return tuple(one for one in sets if one.prompts)


def make_target_builders(
    config: DistillationRunConfig, inputs: Inputs, teacher_paths: Mapping[str, str]
) -> dict[str, TeacherTargetBuilder]:
    """Return one target builder per teacher, by key; needs no model.

    Raises ConfigError for a tokenizer whose bytes are not known, and for a chat template that refuses a user's message.
    """
    student = Vocabulary.of(inputs.tokenizer, stop_token_ids=inputs.encoder.stop_token_ids)
    return {
        key: _make_target_builder(config, key, config.teacher_sections[key], path, student)
        for key, path in teacher_paths.items()
    }


def _make_target_builder(
    config: DistillationRunConfig, key: str, section: TeacherConfig, path: str, student: Vocabulary
) -> TeacherTargetBuilder:
    tokenizer, how = teacher_tokenizer(key, section, path), config.loss_fn.token_matching
    assert how is not None
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=section.tokenizer.chat_template_kwargs)
    try:
        encoder.check()
        teacher = Vocabulary.of(tokenizer, stop_token_ids=encoder.stop_token_ids)
    except ConfigError as error:  # of a tokenizer: its keys are those of `policy`
        raise ConfigError(
            error.key.replace("policy.", f"{key}.", 1), error.value, error.problem, known=error.known
        ) from error
    return TeacherTargetBuilder(
        TokenMap(student, teacher),
        tokenizer=tokenizer,
        encoder=encoder,
        matching=how.matching,
        max_length=None if section.server is not None else _max_teacher_length(section, path, key=key),
    )


def _max_teacher_length(section: TeacherConfig, path: str, *, key: str) -> int | None:
    """Return the teacher's context length, bounded by one of its micro-batches: its tokens may be more than the
    student's."""
    model = load_config(path, section.hf_config_overrides, section=key).get_text_config()
    budgets = [part.logprob_mb_tokens for part in (section.sequence_packing, section.dynamic_batching) if part.enabled]
    return min(filter(None, (getattr(model, "max_position_embeddings", None), *budgets)), default=None)


def cross_tokenizer_context(
    config: DistillationRunConfig, inputs: Inputs, target_builders: Mapping[str, TeacherTargetBuilder]
) -> LossContext:
    """Return what the loss needs; raises ConfigError where unmatched tokens count and differ between teachers."""
    section = config.loss_fn.token_matching
    assert section is not None
    unmatched = [target_builder.token_map.student_unmatched for target_builder in target_builders.values()]
    differ = any(not np.array_equal(unmatched[0], other) for other in unmatched[1:])
    if section.matching == "identical" and section.unmatched_weight > 0 and differ:
        raise ConfigError(
            "loss_fn.cross_tokenizer.unmatched_weight",
            section.unmatched_weight,
            f"{', '.join(sorted(target_builders))} have vocabularies of their own, and each leaves other tokens "
            "unmatched; "
            "allowed: 0, or matching: prefix",
        )
    return LossContext(
        topk=min(config.distillation.topk_logits_k, inputs.vocab_size),
        student_unmatched=torch.from_numpy(unmatched[0]),
    )


def make_cross_tokenizer_stage(
    config: DistillationRunConfig, teachers: Teachers, target_builders: Mapping[str, TeacherTargetBuilder]
) -> CrossTokenizerStage:
    return CrossTokenizerStage(teachers, target_builders, config.distillation.topk_logits_k)
