"""Clip-Cov and KL-Cov (arXiv 2505.22617): tokens whose log-prob covaries most with their advantage are held back.

The covariance of a token is (A - mean A) (lp - mean lp), its means and its rank over the valid tokens of a micro-batch,
as verl has them: of all losses, only these two depend on `policy.train_micro_batch_size` and the number of ranks.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.losses.make import policy_gradient_entry
from nemo_rl.losses.ppo import clipped_surrogate

if TYPE_CHECKING:
    import torch

    from nemo_rl.losses.policy_gradient import PolicyTokens


class ClipCovConfig(PolicyGradientLossConfig):
    """`loss_fn.type: clip_cov`: some of the tokens with a high covariance get no gradient."""

    type: str = "clip_cov"
    clip_cov_ratio: float = Field(default=0.0002, gt=0, le=1)  # share of the tokens that lose it, at least one
    clip_cov_lb: float = 1.0  # of the covariance, exclusive
    clip_cov_ub: float = 5.0  # upper bound of the covariance, exclusive


class KLCovConfig(PolicyGradientLossConfig):
    """`loss_fn.type: kl_cov`: the tokens with the highest covariance pay for leaving the previous policy."""

    type: str = "kl_cov"
    kl_cov_ratio: float = Field(default=0.0002, gt=0, le=1)  # share of the tokens that pay, at least one
    ppo_kl_coef: float = Field(default=1.0, ge=0)  # weight of the penalty |lp - lp_prev|


def covariances(tokens: "PolicyTokens") -> "torch.Tensor":
    """Return the covariance of each valid token, -inf elsewhere, without a gradient: [B, T]."""
    valid = tokens.mask > 0
    current, count = tokens.current.detach(), valid.sum().clamp(min=1)
    advantages = tokens.advantages - tokens.advantages.sum() / count  # both are 0 where the mask is
    return (advantages * (current - current.sum() / count)).masked_fill(~valid, float("-inf"))


def clip_by_covariance(tokens: "PolicyTokens", config: ClipCovConfig) -> "torch.Tensor":
    """Return PPO's clipped term, 0 for a random choice of tokens that PPO does not clip: [B, T].

    It is made among those whose covariance is between `clip_cov_lb` and `clip_cov_ub`.
    """
    loss = clipped_surrogate(tokens, config)
    is_clipped = -tokens.advantages * tokens.clipped_ratio > -tokens.advantages * tokens.ratio
    covariance = covariances(tokens)
    eligible = (covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub) & ~is_clipped
    wanted = max(int(config.clip_cov_ratio * int((tokens.mask > 0).sum())), 1)
    order = loss.new_empty(loss.shape).uniform_().masked_fill(~eligible, -1.0).flatten()
    chosen = order.topk(min(wanted, int(eligible.sum()))).indices
    return loss * loss.new_ones(loss.numel()).index_fill(0, chosen, 0.0).view_as(loss)


def penalize_by_covariance(tokens: "PolicyTokens", config: KLCovConfig) -> "torch.Tensor":
    """Return -A r, plus `ppo_kl_coef` |lp - lp_prev| for the tokens with the highest covariance: [B, T]."""
    covariance = covariances(tokens).flatten()
    num_valid = int((tokens.mask > 0).sum())
    chosen = covariance.topk(min(max(int(config.kl_cov_ratio * num_valid), 1), num_valid)).indices
    pays = covariance.new_zeros(covariance.shape).index_fill(0, chosen, 1.0).view_as(tokens.mask)
    return -tokens.advantages * tokens.ratio + config.ppo_kl_coef * pays * (tokens.current - tokens.prev).abs()


CLIP_COV = policy_gradient_entry(ClipCovConfig, clip_by_covariance, unread=("ratio_clip_c",))
KL_COV = policy_gradient_entry(KLCovConfig, penalize_by_covariance, unread=("ratio_clip_c", "force_on_policy_ratio"))
