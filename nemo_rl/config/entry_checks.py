"""Cross-field checks of algorithms and of the kinds they use: losses, estimators, environments and scorers.

Rules that hold for every entry are here, those of one entry in its own file; each entry's check is run too.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nemo_rl.config.environment import (
    AgentRunnerConfig,
    BatchedScorerConfig,
    EndpointScorerConfig,
    EnvironmentConfig,
    ModelScorerConfig,
    RolloutRunnerConfig,
    SideCallRule,
)
from nemo_rl.config.kinds import Kind, Section
from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy_checks import check_losses, check_policies
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS, ENVIRONMENTS, LOSSES, SCORERS
from nemo_rl.errors import ConfigError, raise_config_errors, suggest_name


def check_grpo(config: GRPORunConfig) -> None:
    """Raise ConfigError for the combinations that cannot run, all at once."""
    checks = (_check_dynamic_sampling, _check_rewards, _check_loss, _check_estimator, _check_penalties, check_policies)
    run_checks(checks, config)


def run_checks(checks: Iterable[Callable[[Any], None]], config: Any) -> None:
    """Run every check, and raise what they found as one ConfigError."""
    found = []
    for one in checks:
        try:
            one(config)
        except ConfigError as error:
            found.append(error)
    raise_config_errors(found)


def check_distillation(config: DistillationRunConfig) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    _check_entry(LOSSES, "loss_fn", config.loss_fn, config)
    section = config.distillation
    if not section.off_policy:
        return
    if section.num_generations_per_prompt != 1:
        raise ConfigError(
            "distillation.num_generations_per_prompt",
            section.num_generations_per_prompt,
            "the dataset has one response for each prompt (distillation.off_policy); allowed: 1",
        )
    if section.async_rollouts.enabled:
        raise ConfigError(
            "distillation.async_rollouts.enabled",
            True,
            "nothing is sampled for training with distillation.off_policy; allowed: false",
        )


def check_policy_gradient(
    key: str, section: PolicyGradientLossConfig, config: Any, *, unread: Sequence[str] = ()
) -> None:
    """Raise ConfigError for shared options that exclude, or need, each other; `unread` are those the loss ignores."""
    for name in unread:
        if value := getattr(section, name):
            allowed = "null" if name == "ratio_clip_c" else "false"
            raise ConfigError(
                f"{key}.{name}", value, f"has no meaning with {key}.type: {section.type}; allowed: {allowed}"
            )
    _check_truncation(key, section)
    _check_ratio_against(key, section)
    if section.use_on_policy_kl_approximation and section.reference_policy_kl_gradient != "score_function":
        problem = f"weights the score function, which {key}.reference_policy_kl_gradient leaves out; allowed: false"
        raise ConfigError(f"{key}.use_on_policy_kl_approximation", True, problem)
    if section.trajectory_token_divisor is not None and section.token_level_loss:
        raise ConfigError(
            f"{key}.trajectory_token_divisor",
            section.trajectory_token_divisor,
            f"divides the sum over a trajectory, which {key}.token_level_loss: true does not form; allowed: null",
        )
    if section.use_kl_in_reward and section.reference_policy_kl_gradient != "score_function":
        problem = f"has no meaning with {key}.use_kl_in_reward, whose KL has no gradient; allowed: score_function"
        raise ConfigError(f"{key}.reference_policy_kl_gradient", section.reference_policy_kl_gradient, problem)
    if section.use_kl_in_reward and section.reference_policy_kl_penalty == 0:
        raise ConfigError(f"{key}.reference_policy_kl_penalty", 0.0, "use_kl_in_reward needs a weight above 0")
    if not isinstance(config, GRPORunConfig):
        raise ConfigError(f"{key}.type", section.type, "reads advantages: for examples/run_grpo.py only")
    num_samples = config.grpo.num_samples_per_step
    if section.force_on_policy_ratio and config.policy.train_global_batch_size != num_samples:
        raise ConfigError(
            f"{key}.force_on_policy_ratio",
            True,
            f"holds for one optimizer step a batch: policy.train_global_batch_size must be {num_samples}",
        )
    if section.ratio_clip_max < section.ratio_clip_min < 1:  # 1: no lower bound
        problem = f"must be at least {key}.ratio_clip_min = {section.ratio_clip_min}"
        raise ConfigError(f"{key}.ratio_clip_max", section.ratio_clip_max, problem)


def _check_truncation(key: str, section: PolicyGradientLossConfig) -> None:
    """Raise ConfigError for a truncation without its upper bound; the lower one is 0 if it is not set."""
    prefix = f"{key}.truncated_importance_sampling"
    high, low = section.truncated_importance_sampling_ratio, section.truncated_importance_sampling_ratio_min
    kind = section.truncated_importance_sampling_type or "tis"
    is_named = section.truncated_importance_sampling_type is not None
    if not is_named and high is None and low is None:
        return
    if not section.use_importance_sampling_correction:
        if kind == "tis" and high is None and low is None:  # as NeMo-RL's recipes write no correction
            return
        raise ConfigError(f"{key}.use_importance_sampling_correction", False, f"{kind} truncates it: must be true")
    if high is None:
        raise ConfigError(f"{prefix}_ratio", None, f"required by {prefix}_type: {kind}")
    if low is not None and low > high:
        raise ConfigError(f"{prefix}_ratio_min", low, f"must be at most the upper bound {high}")


def _check_ratio_against(key: str, section: PolicyGradientLossConfig) -> None:
    """Raise ConfigError for options that a ratio against the engine's log-probs makes meaningless, or wrong twice."""
    if section.ratio_against == "prev":
        return
    for name in ("use_importance_sampling_correction", "force_on_policy_ratio"):
        if getattr(section, name):
            problem = f"{key}.ratio_against: generation corrects for the engine by the ratio; allowed: false"
            raise ConfigError(f"{key}.{name}", True, problem)


def _check_entry(kind: Kind, key: str, section: Section, config: Any) -> None:
    """Run the check of the section's own entry."""
    name = getattr(section, kind.name_key)
    check = kind.entry(name, key=f"{key}.{kind.name_key}").check
    if check is not None:
        check(key, section, config)


def _check_loss(config: GRPORunConfig) -> None:
    _check_entry(LOSSES, "loss_fn", config.loss_fn, config)
    check_losses(config, lambda key, section: _check_entry(LOSSES, key, section, config))


def _check_estimator(config: GRPORunConfig) -> None:
    _check_entry(ADVANTAGE_ESTIMATORS, "grpo.adv_estimator", config.grpo.adv_estimator, config)


def _check_dynamic_sampling(config: GRPORunConfig) -> None:
    has_baseline = config.grpo.adv_estimator.needs_greedy_baseline
    if config.grpo.use_dynamic_sampling and config.grpo.num_generations_per_prompt == 1 and not has_baseline:
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
    is_buffer_read = shaping.enabled and shaping.stop_properly_penalty_coef is None
    if is_buffer_read and shaping.overlong_buffer_length > longest:
        raise ConfigError(
            "grpo.reward_shaping.overlong_buffer_length",
            shaping.overlong_buffer_length,
            f"must be at most the longest response, {longest} tokens",
        )


def _check_penalties(config: GRPORunConfig) -> None:
    """Raise ConfigError for penalties that could not be detected, or would change nothing."""
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


def check_environments(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the first entry of `env` that cannot run."""
    for name, section in config.env.items():
        key = f"env.{name}"
        for scorer in section.scorers:
            if scorer not in config.scorers:
                raise ConfigError(f"{key}.scorers", scorer, "no entry of scorers", known=config.scorers)
        entry = ENVIRONMENTS.entry(section.type or name, key=f"{key}.type")
        if entry.check is not None:
            entry.check(key, section, config)


def check_scorers(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the first entry of `scorers` that cannot score or is not used, and for its placement."""
    used = {name for section in config.env.values() for name in section.scorers}
    for name, section in config.scorers.items():
        key = f"scorers.{name}"
        if name not in used:
            raise ConfigError(key, section.type, "never used; name it in env.<name>.scorers")
        if isinstance(section, BatchedScorerConfig):
            check_timeout(key, section.timeout_s, {"rollout.stall_timeout_s": config.rollout.stall_timeout_s})
        if isinstance(section, EndpointScorerConfig):
            _check_base_urls(key, section)
        entry = SCORERS.entry(section.type or name, key=f"{key}.type")
        if entry.check is not None:
            entry.check(key, section, config)
    _check_placement(config)


def check_agent_runner(key: str, section: AgentRunnerConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for wrappers, for `scored_by` that names no environment, and for a deadline beyond a limit."""
    reject_wrappers(key, section, "agents run one prompt each; allowed: false")
    check_reward_range(key, section)
    environments = [name for name, other in config.env.items() if not isinstance(other, RolloutRunnerConfig)]
    if section.scored_by is not None and section.scored_by not in environments:
        problem = f"no entry of env that is an environment{suggest_name(section.scored_by, environments)}"
        raise ConfigError(f"{key}.scored_by", section.scored_by, problem)
    for i, rule in enumerate(section.side_calls):
        _check_side_call(f"{key}.side_calls.{i}", rule)
    check_session_timeout(key, section.timeout_s, config)


def _check_side_call(key: str, rule: SideCallRule) -> None:
    """Raise ConfigError for a rule that would match every call, and for an invalid regular expression."""
    if rule == SideCallRule():
        raise ConfigError(key, {}, f"matches every call; needs one of {', '.join(SideCallRule.model_fields)}")
    for name in ("model", "system", "last_message"):
        try:
            re.compile(getattr(rule, name) or "")
        except re.error as error:
            raise ConfigError(f"{key}.{name}", getattr(rule, name), f"not a regular expression: {error}") from error


def check_reward_range(key: str, section: RolloutRunnerConfig) -> None:
    """Raise ConfigError for a range of rewards that is empty."""
    if section.reward_min >= section.reward_max:
        problem = f"must be below {key}.reward_max = {section.reward_max:g}"
        raise ConfigError(f"{key}.reward_min", section.reward_min, problem)


def require_package(key: str, value: str, package: str, extra: str) -> None:
    """Raise ConfigError unless `package` can be imported; `extra` is the optional dependency that installs it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(key, value, f"needs the package {package}: install nemo-rl[{extra}]")


def check_call_timeout(key: str, call_timeout_s: float, timeout_s: float) -> None:
    """Raise ConfigError for a deadline of one request that is not below the rollout's."""
    if call_timeout_s >= timeout_s:
        raise ConfigError(f"{key}.call_timeout_s", call_timeout_s, f"must be below {key}.timeout_s = {timeout_s:g}")


def check_session_timeout(key: str, timeout_s: float, config: RolloutRunConfig) -> None:
    """Raise ConfigError for a rollout deadline at which the watchdog or the gateway would have given up already."""
    limits = {
        "rollout.stall_timeout_s": config.rollout.stall_timeout_s,
        "gateway.session_ttl_s": config.gateway.session_ttl_s,
    }
    check_timeout(key, timeout_s, limits)


def check_timeout(key: str, timeout_s: float, limits: Mapping[str, float]) -> None:
    """Raise ConfigError for `<key>.timeout_s` that is not below each of the limits, which are seconds by key."""
    for name, limit in limits.items():
        if timeout_s >= limit:
            raise ConfigError(f"{key}.timeout_s", timeout_s, f"must be below {name} = {limit:g}")


def reject_wrappers(key: str, section: EnvironmentConfig, problem: str) -> None:
    """Raise ConfigError for an entry that supports neither batching nor other processes; `problem` says why."""
    enabled = {
        "batching.enabled": section.batching.enabled,
        "remote.enabled": section.remote.enabled,
        "isolated": section.isolated,
    }
    for part, is_enabled in enabled.items():
        if is_enabled:
            raise ConfigError(f"{key}.{part}", True, problem)


def _check_base_urls(key: str, section: EndpointScorerConfig) -> None:
    for url in section.base_urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{key}.base_urls", url, "must begin with http:// or https://")


def _check_placement(config: RolloutRunConfig) -> None:
    """Raise ConfigError for a pool without GPUs, and for counts without a pool."""
    placement = config.reward_model
    if placement.enable and not any(isinstance(section, ModelScorerConfig) for section in config.scorers.values()):
        raise ConfigError("reward_model.enable", True, "there is no scorer of type reward_model")
    sizes = {"n_gpus_per_node": placement.n_gpus_per_node, "nnodes": placement.nnodes}
    for key, value in sizes.items():
        if placement.enable_resource_pool and value <= 0:
            problem = "a resource pool needs at least 1 (or enable_resource_pool: false)"
            raise ConfigError(f"reward_model.{key}", value, problem)
        if not placement.enable_resource_pool and value != 0:
            problem = "sizes a resource pool, and there is none: set reward_model.enable_resource_pool: true (or 0)"
            raise ConfigError(f"reward_model.{key}", value, problem)
    is_async = isinstance(config, TrainingRunConfig) and config.algorithm.background.enabled
    if placement.shares_device and is_async:
        problem = "allowed: true, since the engine never sleeps while rollouts are collected in the background"
        raise ConfigError("reward_model.enable_resource_pool", False, problem)
    if placement.enable_resource_pool and not placement.enable:
        raise ConfigError("reward_model.enable_resource_pool", True, "needs reward_model.enable: true")
