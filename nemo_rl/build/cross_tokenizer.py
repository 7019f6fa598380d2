"""Teachers with other tokenizers, from the configuration: what stands between them and the student."""

from collections.abc import Mapping

import numpy as np
import torch

from nemo_rl.algorithms.cross_tokenizer import CrossTokenizerStage, TeacherTargetBuilder
from nemo_rl.algorithms.cross_tokenizer_loss import CrossTokenizerLoss
from nemo_rl.algorithms.cross_tokenizer_targets import TokenMap
from nemo_rl.algorithms.teachers import Teachers
from nemo_rl.build.inputs import Inputs
from nemo_rl.build.teachers import teacher_tokenizer
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.token_bytes import Vocabulary
from nemo_rl.errors import ConfigError
from nemo_rl.policy.hf_model import load_config


def make_target_builders(
    config: DistillationRunConfig, inputs: Inputs, teacher_paths: Mapping[str, str]
) -> dict[str, TeacherTargetBuilder]:
    """One a teacher, by its key; needs no model.

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
    tokenizer = teacher_tokenizer(key, section, path)
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=section.tokenizer.chat_template_kwargs)
    try:
        encoder.check()
        teacher = Vocabulary.of(tokenizer, stop_token_ids=encoder.stop_token_ids)
    except ConfigError as error:  # of a tokenizer, whose keys stand under `policy` there
        raise ConfigError(
            error.key.replace("policy.", f"{key}.", 1), error.value, error.problem, known=error.known
        ) from error
    return TeacherTargetBuilder(
        TokenMap(student, teacher),
        tokenizer=tokenizer,
        encoder=encoder,
        matching=config.loss_fn.cross_tokenizer.matching,
        max_length=None if section.server is not None else _max_teacher_length(section, path, key=key),
    )


def _max_teacher_length(section: TeacherConfig, path: str, *, key: str) -> int | None:
    """The teacher's context, and what one of its micro-batches holds: its tokens may be more than the student's."""
    model = load_config(path, section.hf_config_overrides, section=key).get_text_config()
    budgets = [part.logprob_mb_tokens for part in (section.sequence_packing, section.dynamic_batching) if part.enabled]
    return min(filter(None, (getattr(model, "max_position_embeddings", None), *budgets)), default=None)


def make_cross_tokenizer_loss(
    config: DistillationRunConfig, inputs: Inputs, target_builders: Mapping[str, TeacherTargetBuilder]
) -> CrossTokenizerLoss:
    """Raises ConfigError for teachers of which each leaves other tokens unmatched, where these are compared."""
    section = config.loss_fn.cross_tokenizer
    unmatched = [target_builder.token_map.student_unmatched for target_builder in target_builders.values()]
    differ = any(not np.array_equal(unmatched[0], other) for other in unmatched[1:])
    if section.matching == "identical" and section.unmatched_weight > 0 and differ:
        raise ConfigError(
            "loss_fn.cross_tokenizer.unmatched_weight",
            section.unmatched_weight,
            f"{', '.join(sorted(target_builders))} have vocabularies of their own, and each leaves other tokens unmatched; "
            "allowed: 0, or matching: prefix",
        )
    return CrossTokenizerLoss(
        config.loss_fn,
        topk=min(config.distillation.topk_logits_k, inputs.vocab_size),
        student_unmatched=torch.from_numpy(unmatched[0]),
    )


def make_cross_tokenizer_stage(
    config: DistillationRunConfig, teachers: Teachers, target_builders: Mapping[str, TeacherTargetBuilder]
) -> CrossTokenizerStage:
    return CrossTokenizerStage(teachers, target_builders, config.distillation.topk_logits_k)
