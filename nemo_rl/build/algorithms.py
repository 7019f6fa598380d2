"""The algorithm that a configuration asks for: its loss and the stages before it."""

import functools
from collections.abc import Mapping

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantage import make_advantage_estimator
from nemo_rl.algorithms.cross_tokenizer import TeacherTargetBuilder
from nemo_rl.algorithms.distillation import Distillation
from nemo_rl.algorithms.distillation_loss import DistillationLoss
from nemo_rl.algorithms.grpo import GRPO
from nemo_rl.algorithms.loss import PolicyGradientLoss
from nemo_rl.algorithms.penalties import make_penalties
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.run import Algorithm
from nemo_rl.algorithms.stages import RequiredLogprobs
from nemo_rl.algorithms.teachers import LogprobsStage, Teachers, TopKStage
from nemo_rl.build.cross_tokenizer import make_cross_tokenizer_loss, make_cross_tokenizer_stage
from nemo_rl.build.inputs import Inputs
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, TrainingRunConfig
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import AdvantageEstimator, Policy
from nemo_rl.policy.micro_batches import expected_optimizer_steps


def make_algorithm(
    config: TrainingRunConfig,
    inputs: Inputs,
    policy: Policy,
    placement: Placement,
    teachers: Teachers | None = None,
    target_builders: Mapping[str, TeacherTargetBuilder] | None = None,
) -> Algorithm:
    """Loads nothing: policy and teachers are there already; `target_builders` are for teachers with other tokenizers."""
    if isinstance(config, GRPORunConfig):
        return _make_grpo(config, inputs, policy, placement, teachers)
    if isinstance(config, DistillationRunConfig) and teachers is not None:
        if target_builders:
            loss_fn = make_cross_tokenizer_loss(config, inputs, target_builders)
            stage = make_cross_tokenizer_stage(config, teachers, target_builders)
        else:
            loss_fn = DistillationLoss(config.loss_fn, is_on_policy=not config.distillation.off_policy)
            stage = TopKStage(teachers, config.distillation.topk_logits_k, inputs.vocab_size)
        return Distillation(config=config, loss_fn=loss_fn, teacher_stage=stage, placement=placement)
    raise ConfigError(config.algorithm_key, None, "not an algorithm that is trained here")


def _make_grpo(
    config: GRPORunConfig, inputs: Inputs, policy: Policy, placement: Placement, teachers: Teachers | None
) -> GRPO:
    loss_fn = PolicyGradientLoss(config.loss_fn)
    estimator = make_advantage_estimator(
        config.grpo.adv_estimator,
        config.loss_fn,
        clip_low=config.grpo.advantage_clip_low,
        clip_high=config.grpo.advantage_clip_high,
    )
    decode = functools.partial(inputs.encoder.decode, keep_special=True)
    return GRPO(
        config=config,
        loss_fn=loss_fn,
        advantage_estimator=estimator,
        required_logprobs=required_logprobs(config, loss_fn, estimator),
        policy=policy,
        placement=placement,
        teacher_stage=None if teachers is None else LogprobsStage(teachers),
        penalties=make_penalties(config.reward_penalties, config.grpo, decode),
    )


def required_logprobs(
    config: GRPORunConfig, loss_fn: PolicyGradientLoss, estimator: AdvantageEstimator
) -> RequiredLogprobs:
    """With one optimizer step a batch, the loss's own forward pass gives the previous log-probs."""
    num_steps = expected_optimizer_steps(config.grpo.num_samples_per_step, config.policy.train_global_batch_size)
    read_before_training = estimator.required_keys | (
        {keys.PREV_LOGPROBS} if config.grpo.seq_logprob_error_threshold is not None else set()
    )
    return RequiredLogprobs(
        previous=(num_steps > 1 and loss_fn.uses_prev_logprobs) or keys.PREV_LOGPROBS in read_before_training,
        reference=keys.REFERENCE_LOGPROBS in (loss_fn.required_keys | estimator.required_keys),
    )
