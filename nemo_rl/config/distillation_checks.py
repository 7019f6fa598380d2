"""What distillation's own sections need of each other and of the rest."""

from nemo_rl.config.master import DistillationConfig
from nemo_rl.errors import ConfigError


def check_distillation(config: DistillationConfig) -> None:
    """Raise ConfigError for the first combination that cannot run."""
    if config.loss_fn.cross_tokenizer.enabled and config.loss_fn.zero_outside_topk:
        raise ConfigError(
            "loss_fn.zero_outside_topk",
            True,
            "with loss_fn.cross_tokenizer probabilities are what they are; allowed: false",
        )
