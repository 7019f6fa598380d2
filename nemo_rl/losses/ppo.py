"""The clipped surrogate of PPO (arXiv 1707.06347), the default loss of GRPO, with dual clip (arXiv 1912.09729)."""

from typing import TYPE_CHECKING

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.losses.make import policy_gradient_entry

if TYPE_CHECKING:
    import torch

    from nemo_rl.losses.policy_gradient import PolicyTokens


class PPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: ppo`."""

    type: str = "ppo"


def clipped_surrogate(tokens: "PolicyTokens", config: PolicyGradientLossConfig) -> "torch.Tensor":
    """Return max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)) of each token: [B, T].

    With `ratio_clip_c` the term of a token with A < 0 is at most -A ratio_clip_c.
    """
    advantages = tokens.advantages
    loss = (-advantages * tokens.ratio).maximum(-advantages * tokens.clipped_ratio)
    if config.ratio_clip_c is None:
        return loss
    return loss.minimum(-advantages * config.ratio_clip_c).where(advantages < 0, loss)


PPO = policy_gradient_entry(PPOConfig, clipped_surrogate)
