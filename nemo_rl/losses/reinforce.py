"""REINFORCE without an importance ratio, as RLOO uses it (arXiv 2402.14740)."""

from typing import TYPE_CHECKING

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.losses.make import policy_gradient_entry

if TYPE_CHECKING:
    import torch

    from nemo_rl.losses.policy_gradient import PolicyTokens


class REINFORCEConfig(PolicyGradientLossConfig):
    """`loss_fn.type: reinforce`; the clip bounds only serve the ratio's metrics."""

    type: str = "reinforce"

    @property
    def uses_prev_logprobs(self) -> bool:
        """Return whether importance weights, the only reader of `prev_logprobs`, are on."""
        return self.use_importance_sampling_correction


def weighted_logprob(tokens: "PolicyTokens", config: REINFORCEConfig) -> "torch.Tensor":
    """Return -A lp of each token: [B, T]."""
    return -tokens.advantages * tokens.current


REINFORCE = policy_gradient_entry(REINFORCEConfig, weighted_logprob, unread=("force_on_policy_ratio", "ratio_clip_c"))
