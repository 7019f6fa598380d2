"""Policy-gradient losses by name: each is a section of its own and a term, the loss of each token before weights.

r is the ratio of a token's probability to that under the previous policy, A its advantage, lp its log-prob. Loads no
torch, since entries are imported whenever a configuration is read. Formulas and recipes: docs/losses.md.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.errors import ConfigError
from nemo_rl.losses.make import policy_gradient_entry

if TYPE_CHECKING:
    import torch

    from nemo_rl.losses.policy_gradient import PolicyTokens

SMALLEST_LOG_WEIGHT = math.log(1e-8)  # VESPO's
TINY = 1e-8  # keeps the logarithm of DPPO's divergence finite


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
    """`loss_fn.type: gspo` (arXiv 2507.18071): the clipped surrogate with one ratio per sequence.

    It is the geometric mean of the tokens' ratios; importance weights belong to whole sequences too.
    """

    is_sequence_level: ClassVar[bool] = True

    type: str = "gspo"
    token_level_loss: bool = False


def check_gspo(key: str, section: GSPOConfig, config: Any) -> None:
    """Raise ConfigError for options that need one ratio per token."""
    if section.token_level_loss:
        raise ConfigError(f"{key}.token_level_loss", True, f"{section.type} has one ratio per sequence; allowed: false")
    if section.truncated_importance_sampling_type == "seq-mask-tis":
        raise ConfigError(
            f"{key}.truncated_importance_sampling_type",
            "seq-mask-tis",
            f"has no meaning with {key}.type: {section.type}",
        )


GSPO = policy_gradient_entry(GSPOConfig, clipped_surrogate, check=check_gspo)


class GSPOTokenConfig(GSPOConfig):
    """`loss_fn.type: gspo_token` (arXiv 2507.18071, section 4.3): GSPO's ratio, with an advantage for each token."""

    type: str = "gspo_token"


def clipped_token_surrogate(tokens: "PolicyTokens", config: GSPOTokenConfig) -> "torch.Tensor":
    """Return the clipped surrogate of sg(s) lp / sg(lp), whose value is the sequence's ratio s: [B, T]."""
    ratio = tokens.ratio.detach() * (tokens.current - tokens.current.detach()).exp()
    clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    return clipped_surrogate(replace(tokens, ratio=ratio, clipped_ratio=clipped), config)


GSPO_TOKEN = policy_gradient_entry(GSPOTokenConfig, clipped_token_surrogate, check=check_gspo)


class GMPOConfig(GSPOConfig):
    """`loss_fn.type: gmpo` (arXiv 2507.20673): the geometric mean of a sequence's ratios, each clipped before it.

    The bounds are those of the log-ratio: [-ratio_clip_min, ratio_clip_max]; metrics of the clipped ratio do not apply.
    """

    type: str = "gmpo"
    ratio_clip_min: float = Field(default=0.4, ge=0)  # bound of each log-ratio below
    ratio_clip_max: float = Field(default=0.4, ge=0)  # bound of each log-ratio above


def geometric_mean(tokens: "PolicyTokens", config: GMPOConfig) -> "torch.Tensor":
    """Return -A exp(mean of the log-ratios, those that gain most from leaving the bounds held there): [B, T].

    With A > 0 a log-ratio counts at most `ratio_clip_max`, with A < 0 at least -`ratio_clip_min`.
    """
    log_ratio = tokens.log_ratio
    bounded = log_ratio.clamp(max=config.ratio_clip_max).where(tokens.advantages > 0, log_ratio)
    bounded = log_ratio.clamp(min=-config.ratio_clip_min).where(tokens.advantages < 0, bounded)
    num_tokens = (tokens.mask > 0).sum(-1, keepdim=True).clamp(min=1)
    return -tokens.advantages * (bounded.sum(-1, keepdim=True) / num_tokens).exp()


GMPO = policy_gradient_entry(GMPOConfig, geometric_mean, check=check_gspo, unread=("ratio_clip_c",))


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
    """`loss_fn.type: sapo` (arXiv 2511.20347): a sigmoid of the ratio in place of the clip, steeper if A <= 0.

    The clip bounds only serve the ratio's metrics.
    """

    type: str = "sapo"
    token_level_loss: bool = False
    tau_pos: float = Field(default=1.0, gt=0)  # temperature of tokens with A > 0
    tau_neg: float = Field(default=1.05, gt=0)  # temperature of the others


def soft_gated(tokens: "PolicyTokens", config: SAPOConfig) -> "torch.Tensor":
    """Return -A sigmoid(tau (r - 1)) 4 / tau of each token, whose gradient at r = 1 is that of -A r: [B, T].

    Example: A = 1, r = 1.5, tau = 1: -2.48984.
    """
    positive = tokens.advantages > 0
    tau = config.tau_pos * positive + config.tau_neg * ~positive
    return -tokens.advantages * (tau * (tokens.ratio - 1)).sigmoid() * 4 / tau


SAPO = policy_gradient_entry(SAPOConfig, soft_gated, unread=("ratio_clip_c",))


class VESPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: vespo` (arXiv 2602.10693): the ratio of whole sequences, shaped by a gamma density, is a weight.

    The clip bounds only serve the ratio's metrics.
    """

    weights_term: ClassVar[bool] = False

    type: str = "vespo"
    k_pos: float = Field(default=2.0, ge=0)  # shape, if A >= 0
    lambda_pos: float = Field(default=3.0, gt=0)  # rate, if A >= 0
    k_neg: float = Field(default=3.0, ge=0)  # shape, if A < 0
    lambda_neg: float = Field(default=2.0, gt=0)  # rate, if A < 0


def gamma_weighted_logprob(tokens: "PolicyTokens", config: VESPOConfig) -> "torch.Tensor":
    """Return -A phi(w) lp of each token, phi(w) = e^(lambda (1 - w)) w^k, without a gradient: [B, T].

    w is the product of the sequence's ratios, times that of its sampling weights if these are on; its logarithm is
    within [log 1e-8, 20], as are those of the weights. Example: w = 2, k = 2, lambda = 3: 4 e^-3 = .19915.
    """
    log_w = tokens.log_ratio.detach().clamp(-20, 20).sum(-1, keepdim=True)
    if config.use_importance_sampling_correction:
        log_weights = tokens.sampling_weights.log().clamp(SMALLEST_LOG_WEIGHT, 20)
        log_w = log_w + (log_weights * (tokens.mask > 0)).sum(-1, keepdim=True)
    log_w = log_w.clamp(SMALLEST_LOG_WEIGHT, 20)
    gains = tokens.advantages >= 0
    k = config.k_pos * gains + config.k_neg * ~gains
    rate = config.lambda_pos * gains + config.lambda_neg * ~gains
    phi = (rate * (1 - log_w.exp()) + k * log_w).exp()
    return -tokens.advantages * phi * tokens.current


def check_vespo(key: str, section: VESPOConfig, config: Any) -> None:
    """Raise ConfigError for truncations of whole sequences, whose product is what VESPO shapes."""
    kind = section.truncated_importance_sampling_type
    if kind not in (None, "tis", "icepop"):
        problem = f"has no meaning with {key}.type: vespo; allowed: tis, icepop"
        raise ConfigError(f"{key}.truncated_importance_sampling_type", kind, problem)


VESPO = policy_gradient_entry(
    VESPOConfig, gamma_weighted_logprob, check=check_vespo, unread=("force_on_policy_ratio", "ratio_clip_c")
)


class DPPOConfig(PolicyGradientLossConfig):
    """`loss_fn.type: dppo` (arXiv 2602.04879): tokens whose probability moved too far get no gradient.

    The clip bounds are those of the divergence between the two Bernoulli distributions of this token and all others:
    `ratio_clip_max` if A > 0 and the token gained, else `ratio_clip_min`.
    """

    type: str = "dppo"
    divergence: Literal["tv", "kl"] = "tv"  # |p - p_prev|, or the Kullback-Leibler divergence
    two_sided: bool = False  # tokens that moved against their advantage are held too


def held_within_divergence(tokens: "PolicyTokens", config: DPPOConfig) -> "torch.Tensor":
    """Return -A r of each token, 0 outside of the divergence's bounds; -A sg(min(r, c)) lp with `ratio_clip_c`: [B, T].

    Both have the gradient of -A r if r is below c.
    """
    p = tokens.current.detach().exp()
    base = (tokens.current - tokens.log_ratio).detach().exp().clamp(max=1)
    distance = (p - base).abs()
    if config.divergence == "kl":
        distance = base * (base / p).log() + (1 - base) * ((1 - base + TINY) / (1 - p + TINY)).log()
    gained, wanted = p > base, tokens.advantages > 0
    moved_too_far = (distance > config.ratio_clip_max).where(wanted, distance > config.ratio_clip_min)
    held = moved_too_far if config.two_sided else moved_too_far & (gained == wanted)
    if config.ratio_clip_c is None:
        return -tokens.advantages * tokens.ratio * ~held
    return -tokens.advantages * tokens.ratio.detach().clamp(max=config.ratio_clip_c) * tokens.current * ~held


DPPO = policy_gradient_entry(DPPOConfig, held_within_divergence, unread=("force_on_policy_ratio",))


class REINFORCEConfig(PolicyGradientLossConfig):
    """`loss_fn.type: reinforce`: no importance ratio, as RLOO has it (arXiv 2402.14740).

    The clip bounds only serve the ratio's metrics.
    """

    type: str = "reinforce"

    @property
    def uses_prev_logprobs(self) -> bool:
        """Return whether importance weights or a penalty, the readers of `prev_logprobs`, are on."""
        return self.use_importance_sampling_correction or (self.log_ratio_penalty > 0 and super().uses_prev_logprobs)

    @property
    def tolerates_stale_samples(self) -> bool:
        """Return whether importance weights are on: the term has no ratio."""
        return self.use_importance_sampling_correction


def weighted_logprob(tokens: "PolicyTokens", config: REINFORCEConfig) -> "torch.Tensor":
    """Return -A lp of each token: [B, T]."""
    return -tokens.advantages * tokens.current


REINFORCE = policy_gradient_entry(REINFORCEConfig, weighted_logprob, unread=("force_on_policy_ratio", "ratio_clip_c"))


class ClipCovConfig(PolicyGradientLossConfig):
    """`loss_fn.type: clip_cov`: some of the tokens with a high covariance get no gradient."""

    type: str = "clip_cov"
    clip_cov_ratio: float = Field(default=0.0002, gt=0, le=1)  # share of the tokens that lose it, at least one
    clip_cov_lb: float = 1.0  # lower bound of the covariance, exclusive
    clip_cov_ub: float = 5.0  # upper bound of the covariance, exclusive


class KLCovConfig(PolicyGradientLossConfig):
    """`loss_fn.type: kl_cov`: the tokens with the highest covariance pay for leaving the previous policy."""

    type: str = "kl_cov"
    kl_cov_ratio: float = Field(default=0.0002, gt=0, le=1)  # share of the tokens that pay, at least one
    ppo_kl_coef: float = Field(default=1.0, ge=0)  # weight of the penalty, the absolute log-ratio


def covariances(tokens: "PolicyTokens") -> "torch.Tensor":
    """Return (A - mean A) (lp - mean lp) of each valid token, -inf elsewhere, without a gradient: [B, T].

    Its means, and its rank, are over the valid tokens of a micro-batch, as verl has them: beside
    `top_entropy_quantile`, only the two losses of arXiv 2505.22617 depend on `policy.train_micro_batch_size` and the
    number of ranks.
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
    """Return -A r, plus `ppo_kl_coef` |log r| for the tokens with the highest covariance: [B, T]."""
    covariance = covariances(tokens).flatten()
    num_valid = int((tokens.mask > 0).sum())
    chosen = covariance.topk(min(max(int(config.kl_cov_ratio * num_valid), 1), num_valid)).indices
    pays = covariance.new_zeros(covariance.shape).index_fill(0, chosen, 1.0).view_as(tokens.mask)
    return -tokens.advantages * tokens.ratio + config.ppo_kl_coef * pays * tokens.log_ratio.abs()


CLIP_COV = policy_gradient_entry(ClipCovConfig, clip_by_covariance, unread=("ratio_clip_c",))
KL_COV = policy_gradient_entry(KLCovConfig, penalize_by_covariance, unread=("ratio_clip_c", "force_on_policy_ratio"))
