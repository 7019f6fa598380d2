"""Cross-field checks of the algorithm's own sections: loss, advantage estimator, reward penalties, distillation."""

from collections.abc import Callable

from nemo_rl.config.loss import LossConfig
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig
from nemo_rl.errors import ConfigError


def check_loss(config: GRPORunConfig) -> None:
    """Raise ConfigError for a combination that has no formula in docs/losses.md."""
    loss, grpo = config.loss_fn, config.grpo
    check_loss_fn(loss)
    samples = grpo.num_samples_per_step
    if loss.force_on_policy_ratio and config.policy.train_global_batch_size != samples:
        raise ConfigError(
            "loss_fn.force_on_policy_ratio",
            True,
            f"holds for one optimizer step a batch: policy.train_global_batch_size must be {samples}",
        )


def check_loss_fn(loss: LossConfig) -> None:
    """Raise ConfigError for options of `loss_fn` that exclude, or need, each other."""
    _check_ratio(loss)
    _check_truncation(loss)


def _check_ratio(loss: LossConfig) -> None:
    if loss.use_cispo:
        _reject_combination("use_cispo", loss, "disable_ppo_ratio", "force_on_policy_ratio", "ratio_clip_c")
        _reject_combination("use_cispo", loss, "sequence_level_importance_ratios")
    if loss.disable_ppo_ratio:
        _reject_combination(
            "disable_ppo_ratio", loss, "force_on_policy_ratio", "ratio_clip_c", "sequence_level_importance_ratios"
        )
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        raise ConfigError(
            "loss_fn.token_level_loss",
            True,
            "sequence_level_importance_ratios (GSPO) needs false: one ratio a sequence",
        )


def _reject_combination(key: str, loss: LossConfig, *others: str) -> None:
    for other in others:
        value = getattr(loss, other)
        if value:
            allowed = "null" if other == "ratio_clip_c" else "false"
            raise ConfigError(f"loss_fn.{other}", value, f"has no meaning with loss_fn.{key}; allowed: {allowed}")


def _check_truncation(loss: LossConfig) -> None:
    """Off-policy correction: every kind has an upper bound; the lower one is 0 where it is not set."""
    key = "loss_fn.truncated_importance_sampling"
    high, low = loss.truncated_importance_sampling_ratio, loss.truncated_importance_sampling_ratio_min
    kind = loss.truncated_importance_sampling_type or "tis"
    is_named = loss.truncated_importance_sampling_type is not None
    if not is_named and high is None and low is None:
        return
    if not loss.use_importance_sampling_correction:
        if kind == "tis" and high is None and low is None:  # as NeMo-RL's recipes have it where nothing is corrected
            return
        raise ConfigError("loss_fn.use_importance_sampling_correction", False, f"{kind} truncates it: must be true")
    if high is None:
        raise ConfigError(f"{key}_ratio", None, f"required by {key}_type: {kind}")
    if low is not None and low > high:
        raise ConfigError(f"{key}_ratio_min", low, f"must be at most the upper bound {high}")
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        raise ConfigError(f"{key}_type", kind, "has no meaning with loss_fn.sequence_level_importance_ratios")


def check_advantages(config: GRPORunConfig) -> None:
    """Raise ConfigError where an estimator lacks what it reads, or is given what it never reads."""
    estimator, loss = config.grpo.adv_estimator, config.loss_fn
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        raise ConfigError("loss_fn.reference_policy_kl_penalty", 0.0, "use_kl_in_reward needs a weight above 0")
    if estimator.reward_weights and estimator.name != "gdpo":
        raise ConfigError(
            "grpo.adv_estimator.reward_weights", estimator.reward_weights, "read by name: gdpo only; allowed: {}"
        )
    if estimator.name == "opd":
        _reject_reward_options(config)
    if estimator.name == "gdpo":
        for name in ("reward_scaling", "reward_shaping"):
            if getattr(config.grpo, name).enabled:
                raise ConfigError(
                    f"grpo.{name}.enabled", True, "gdpo reads the named rewards as they are; allowed: false"
                )
    if not estimator.minus_baseline and estimator.name != "reinforce_plus_plus":
        raise ConfigError(
            "grpo.adv_estimator.minus_baseline", False, "read by name: reinforce_plus_plus only; allowed: true"
        )


def _reject_reward_options(config: GRPORunConfig) -> None:
    """opd reads what teachers say and no reward: what shapes or selects by rewards would be without effect, or drop
    prompts for no reason."""
    grpo = config.grpo
    reward_options = {
        "loss_fn.use_kl_in_reward": config.loss_fn.use_kl_in_reward,
        "grpo.reward_scaling.enabled": grpo.reward_scaling.enabled,
        "grpo.reward_shaping.enabled": grpo.reward_shaping.enabled,
        "grpo.use_dynamic_sampling": grpo.use_dynamic_sampling,
        "grpo.adv_estimator.use_leave_one_out_baseline": grpo.adv_estimator.use_leave_one_out_baseline,
    }
    for key in (key for key, value in reward_options.items() if value):
        raise ConfigError(key, True, "adv_estimator.name: opd reads no reward; allowed: false")


def check_penalties(config: GRPORunConfig) -> None:
    """Raise ConfigError for penalties that could not be seen, or would change nothing."""
    penalties = config.reward_penalties
    if penalties.penalize_unwanted_tokens and not penalties.token_ids.unwanted:
        raise ConfigError("reward_penalties.token_ids.unwanted", [], "needed by penalize_unwanted_tokens")
    if not all(penalties.thinking_tags) or len(set(penalties.thinking_tags)) < 2:
        raise ConfigError(
            "reward_penalties.thinking_tags", penalties.thinking_tags, "must be the opening and the closing tag"
        )
    if not all(penalties.invalid_tool_call_patterns):
        raise ConfigError(
            "reward_penalties.invalid_tool_call_patterns", penalties.invalid_tool_call_patterns, "none may be empty"
        )
    if penalties.enabled and config.grpo.adv_estimator.name == "gdpo":
        raise ConfigError(
            f"reward_penalties.{penalties.enabled[0]}", True, "gdpo reads the named rewards as they are; allowed: false"
        )


def check_grpo(config: GRPORunConfig) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    checks: tuple[Callable[[GRPORunConfig], None], ...] = (
        _check_dynamic_sampling,
        _check_rewards,
        check_loss,
        check_advantages,
        check_penalties,
    )
    for one in checks:
        one(config)


def _check_dynamic_sampling(config: GRPORunConfig) -> None:
    if config.grpo.use_dynamic_sampling and config.grpo.num_generations_per_prompt == 1:
        raise ConfigError(
            "grpo.use_dynamic_sampling", True, "would drop every group: grpo.num_generations_per_prompt must be above 1"
        )


def _check_rewards(config: GRPORunConfig) -> None:
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        raise ConfigError("grpo.advantage_clip_low", low, f"must be at most grpo.advantage_clip_high = {high}")
    scaling, shaping = config.grpo.reward_scaling, config.grpo.reward_shaping
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        raise ConfigError(
            "grpo.reward_scaling.source_min", scaling.source_min, f"must be below source_max = {scaling.source_max}"
        )
    longest = shaping.max_response_length or config.policy.max_response_length
    if shaping.enabled and shaping.overlong_buffer_length > longest:
        raise ConfigError(
            "grpo.reward_shaping.overlong_buffer_length",
            shaping.overlong_buffer_length,
            f"must be at most the longest response, {longest} tokens",
        )


def check_distillation(config: DistillationRunConfig) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    if config.loss_fn.cross_tokenizer.enabled and config.loss_fn.zero_outside_topk:
        raise ConfigError(
            "loss_fn.zero_outside_topk",
            True,
            "with loss_fn.cross_tokenizer probabilities are what they are; allowed: false",
        )
    own = config.distillation
    if not own.off_policy:
        return
    if own.num_generations_per_prompt != 1:
        raise ConfigError(
            "distillation.num_generations_per_prompt",
            own.num_generations_per_prompt,
            "the data set has one response a prompt (distillation.off_policy); allowed: 1",
        )
    if own.async_rollouts.enabled:
        raise ConfigError(
            "distillation.async_rollouts.enabled",
            True,
            "nothing is sampled for training with distillation.off_policy; allowed: false",
        )
