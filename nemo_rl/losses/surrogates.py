"""Policy-gradient losses by name: each is a section of its own and a term, the loss of each token before weights.

r is the ratio of a token's probability to that under the previous policy, A its advantage, lp its log-prob. Loads no
torch, since entries are imported whenever a configuration is read. Formulas and recipes: docs/losses.md.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.errors import ConfigError
from nemo_rl.losses.make import policy_gradient_entry

if TYPE_CHECKING:
    import torch

    from nemo_rl.losses.policy_gradient import PolicyTokens


class PPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: ppo`: the clipped surrogate (arXiv 1707.06347) with dual clip (1912.09729), GRPO's default."""

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


class GSPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: gspo` (arXiv 2507.18071): the clipped surrogate with one ratio a sequence.

    It is the geometric mean of the tokens' ratios; importance weights belong to whole sequences too.
    """

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


class CISPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: cispo` (MiniMax-M1, arXiv 2506.13585): clipped tokens keep a gradient.

    The clipped ratio is a weight. Reads neither `ratio_clip_c` nor `force_on_policy_ratio`.
    """

    type: str = "cispo"


def clip_weighted_logprob(tokens: "PolicyTokens", config: CISPOConfig) -> "torch.Tensor":
    """Return -A stop_gradient(clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)) lp of each token: [B, T]."""
    return -tokens.advantages * tokens.clipped_ratio.detach() * tokens.current


CISPO = policy_gradient_entry(CISPOConfig, clip_weighted_logprob, unread=("force_on_policy_ratio", "ratio_clip_c"))


class SAPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: sapo` (arXiv 2511.20347): a sigmoid of the ratio in place of the clip, steeper where A <= 0.

    The clip bounds only serve the ratio's metrics.
    """

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


class REINFORCEConfig(PolicyGradientLossConfig):
    """`loss_fn.type: reinforce`: no importance ratio, as RLOO has it (arXiv 2402.14740).

    The clip bounds only serve the ratio's metrics.
    """

    type: str = "reinforce"

    @property
    def uses_prev_logprobs(self) -> bool:
        """Return whether importance weights, the only reader of `prev_logprobs`, are on."""
        return self.use_importance_sampling_correction


def weighted_logprob(tokens: "PolicyTokens", config: REINFORCEConfig) -> "torch.Tensor":
    """Return -A lp of each token: [B, T]."""
    return -tokens.advantages * tokens.current


REINFORCE = policy_gradient_entry(REINFORCEConfig, weighted_logprob, unread=("force_on_policy_ratio", "ratio_clip_c"))


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
    """Return (A - mean A) (lp - mean lp) of each valid token, -inf elsewhere, without a gradient: [B, T].

    Its means, and its rank, are over the valid tokens of a micro-batch, as verl has them: of all losses, only the two
    of arXiv 2505.22617 depend on `policy.train_micro_batch_size` and the number of ranks.
    """
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
