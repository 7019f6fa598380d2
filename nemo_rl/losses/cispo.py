"""CISPO (MiniMax-M1, arXiv 2506.13585): the clipped ratio is a weight, so that clipped tokens keep a gradient."""

from typing import TYPE_CHECKING

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.losses.make import policy_gradient_entry

if TYPE_CHECKING:
    import torch

    from nemo_rl.losses.policy_gradient import PolicyTokens


class CISPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: cispo`; reads neither `ratio_clip_c` nor `force_on_policy_ratio`."""

    type: str = "cispo"


def weighted_logprob(tokens: "PolicyTokens", config: CISPOConfig) -> "torch.Tensor":
    """Return -A stop_gradient(clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)) lp of each token: [B, T]."""
    return -tokens.advantages * tokens.clipped_ratio.detach() * tokens.current


CISPO = policy_gradient_entry(CISPOConfig, weighted_logprob, unread=("force_on_policy_ratio", "ratio_clip_c"))
