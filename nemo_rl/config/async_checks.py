"""What asynchronous training needs of the other sections."""

from nemo_rl.config.master import GRPOConfig
from nemo_rl.errors import ConfigError


def check_async(config: GRPOConfig) -> None:
    """Raise ConfigError for asynchronous training that would learn from samples as if they were the policy's own."""
    section = config.grpo.async_grpo
    if not section.enabled:
        return
    if not config.loss_fn.use_importance_sampling_correction:
        raise ConfigError(
            "loss_fn.use_importance_sampling_correction",
            False,
            "grpo.async_grpo trains on samples of older weights: must be true (see truncated_importance_sampling_type)",
        )
