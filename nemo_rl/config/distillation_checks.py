"""What distillation's own sections need of each other and of the rest."""

from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.errors import ConfigError


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
