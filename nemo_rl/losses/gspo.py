"""GSPO (arXiv 2507.18071): the clipped surrogate with one ratio a sequence, the geometric mean of its tokens'."""

from typing import Any, ClassVar

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.errors import ConfigError
from nemo_rl.losses.make import policy_gradient_entry
from nemo_rl.losses.ppo import clipped_surrogate


class GSPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: gspo`: ratio and importance weight belong to whole sequences."""

    is_sequence_level: ClassVar[bool] = True

    type: str = "gspo"
    token_level_loss: bool = False


def check_gspo(key: str, section: GSPOConfig, config: Any) -> None:
    """Raise ConfigError for options that need one ratio a token."""
    if section.token_level_loss:
        raise ConfigError(f"{key}.token_level_loss", True, "GSPO has one ratio a sequence; allowed: false")
    if section.truncated_importance_sampling_type == "seq-mask-tis":
        raise ConfigError(
            f"{key}.truncated_importance_sampling_type",
            "seq-mask-tis",
            f"has no meaning with {key}.type: {section.type}",
        )


GSPO = policy_gradient_entry(GSPOConfig, clipped_surrogate, check=check_gspo)
