"""What GRPO's own sections need of each other and of the rest."""

from collections.abc import Callable

from nemo_rl.config.loss_checks import check_advantages, check_loss
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.config.penalty_checks import check_penalties
from nemo_rl.errors import ConfigError


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
