"""What distillation's own sections need of each other and of the rest."""

from nemo_rl.config.master import DistillationConfig


def check_distillation(config: DistillationConfig) -> None:
    """Raise ConfigError for the first combination that cannot run."""
