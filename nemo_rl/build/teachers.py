"""Teachers from the configuration: checked against the policy before a model loads, then opened where they stand."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.teachers import TeacherHandle, Teachers
from nemo_rl.build.inputs import Inputs
from nemo_rl.build.models import resolve_model
from nemo_rl.config.layout import Layout
from nemo_rl.config.master import DistillationRunConfig, TrainingRunConfig
from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.config.teacher_checks import check_task_teachers, uses_cross_tokenizer, uses_teachers
from nemo_rl.data.tokenizer import load_tokenizer_with_template
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import Teacher
from nemo_rl.policy.hf_model import load_config
from nemo_rl.policy.megatron.checks import check_model
from nemo_rl.policy.served_teacher import ServedTeacher
from nemo_rl.policy.teacher import LocalTeacher
from nemo_rl.policy.tensor_parallel import check_tensor_parallel

if TYPE_CHECKING:
    from nemo_rl.distributed.placement import Reservation


async def resolve_teachers(config: TrainingRunConfig) -> dict[str, str]:
    """The path or hub name of each teacher's model, by key; the quickstart's is made at its first use."""
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
            if section.megatron_cfg.enabled:
                check_model(section.megatron_cfg, model, key=f"{key}.megatron_cfg")
            else:
                check_tensor_parallel(section.dtensor_cfg.tensor_parallel_size, model, section=key)
            sizes[key] = model.get_text_config().vocab_size
            if not uses_cross_tokenizer(config):  # there, what the teacher has no room for is left out
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
    """Its own; raises ConfigError under the teacher's key."""
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
    """Start them, each off the policy's device until it is asked; None where nobody asks any. `stack` closes them."""
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
    from nemo_rl.policy.teacher_group import TeacherGroup  # loads Ray

    seats = [reservation.seat(slot) for slot in layout.teachers[key]]
    group = await TeacherGroup.create(
        section, seats=seats, timeout_s=config.cluster.start_timeout_s, log_dir=log_dir, **arguments
    )
    stack.push_async_callback(group.close)
    await stack.enter_async_context(group.ends_this_task())
    return group
