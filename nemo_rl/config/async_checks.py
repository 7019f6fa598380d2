"""What training on rollouts collected in the background needs of the other sections."""

from nemo_rl.config.master import GRPORunConfig, TrainingRunConfig
from nemo_rl.errors import ConfigError


def check_async(config: TrainingRunConfig) -> None:
    """Raise ConfigError for GRPO that would learn from samples of older weights as if they were the policy's own.

    Distillation needs no correction: its loss compares distributions at whatever tokens were sampled.
    """
    if not config.algorithm.background.enabled or not isinstance(config, GRPORunConfig):
        return
    if not config.loss_fn.use_importance_sampling_correction:
        raise ConfigError(
            "loss_fn.use_importance_sampling_correction",
            False,
            "grpo.async_grpo trains on samples of older weights: must be true (see truncated_importance_sampling_type)",
        )
