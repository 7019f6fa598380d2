"""What `reward_penalties` needs, and what it does not go with."""

from nemo_rl.config.master import GRPORunConfig
from nemo_rl.errors import ConfigError


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
