"""SAPO (arXiv 2511.20347): a sigmoid of the ratio in place of the clip, steeper for tokens with A <= 0."""

from typing import TYPE_CHECKING

from pydantic import Field

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.losses.make import policy_gradient_entry

if TYPE_CHECKING:
    import torch

    from nemo_rl.losses.policy_gradient import PolicyTokens


class SAPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: sapo`; the clip bounds only serve the ratio's metrics."""

    type: str = "sapo"
    token_level_loss: bool = False
    tau_pos: float = Field(default=1.0, gt=0)  # temperature of tokens with A > 0
    tau_neg: float = Field(default=1.05, gt=0)  # of the others


def soft_gated(tokens: "PolicyTokens", config: SAPOConfig) -> "torch.Tensor":
    """Return -A sigmoid(tau (r - 1)) 4 / tau of each token, whose gradient at r = 1 is that of -A r: [B, T].

    Example: A = 1, r = 1.5, tau = 1: -2.48984.
    """
    positive = tokens.advantages > 0
    tau = config.tau_pos * positive + config.tau_neg * ~positive
    return -tokens.advantages * (tau * (tokens.ratio - 1)).sigmoid() * 4 / tau


SAPO = policy_gradient_entry(SAPOConfig, soft_gated, unread=("ratio_clip_c",))
