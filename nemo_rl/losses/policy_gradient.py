"""Shared parts of policy-gradient losses: a batch's tokens, their weights, importance weights, KL, and the metrics.

A loss type adds its `term` (surrogates.py). Formulas and recipes: docs/losses.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy.micro_batches import loss_mask
from nemo_rl.types import TrainingBatch

MAX_EXP_INPUT = 88.0  # exp of it is still finite in float32


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The tokens of a micro-batch: [B, T] float32 each, 0 at masked tokens, so that padding can hold anything."""

    mask: torch.Tensor
    current: torch.Tensor  # log-probs of the weights that are trained; with a gradient
    prev: torch.Tensor
    generation: torch.Tensor
    advantages: torch.Tensor
    log_ratio: torch.Tensor  # current - prev, or - generation (`ratio_against`), with a gradient
    ratio: torch.Tensor  # exp(log_ratio), with a gradient; [B, 1] if a sequence has one ratio
    clipped_ratio: torch.Tensor  # like `ratio`, within [1 - ratio_clip_min, 1 + ratio_clip_max]
    sampling_weights: torch.Tensor  # exp(prev - generation), truncated; or [B, 1]
    out_of_bounds: torch.Tensor  # 1 at truncated tokens
    entropy: torch.Tensor | None = None  # entropy of the whole distribution, with a gradient, if the loss reads it


class PolicyGradientLoss:
    """Sum over tokens of `weight * policy term + reference_policy_kl_penalty * KL`, each token over the step's counts.

    With r = exp(lp - lp_prev), `term` gives the policy term of each token, [B, T], from `PolicyTokens` and the
    section. A token counts 1 / number of valid tokens of the optimizer step, or, without `token_level_loss`,
    1 / (tokens of its trajectory, or `trajectory_token_divisor`, * number of valid trajectories), so any split into
    micro-batches or ranks adds up to the same loss and gradient; only `top_entropy_quantile` selects within one.
    `entropy_coef` subtracts the mean entropy of the valid tokens; `positive_example_nll_weight` adds the mean of -lp
    over those of samples with a reward above 0.
    """

    def __init__(
        self,
        config: PolicyGradientLossConfig,
        term: Callable[[PolicyTokens, PolicyGradientLossConfig], torch.Tensor],
    ) -> None:
        self.config = config
        self._term = term

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the keys of the batch that the configured terms read."""
        config = self.config
        required = {keys.TOKEN_MASK, keys.SAMPLE_MASK, keys.GENERATION_LOGPROBS, keys.ADVANTAGES}
        if not config.token_level_loss and config.trajectory_token_divisor is None:
            required.add(keys.TRAJECTORY_TOKENS)
        if config.reference_policy_kl_penalty > 0:
            required.add(keys.REFERENCE_LOGPROBS)
        if config.positive_example_nll_weight > 0:
            required.add(keys.REWARD)
        return frozenset(required)

    @property
    def required_scores(self) -> RequiredScores:
        """Return that log-probs of the tokens themselves are enough, but for options that read the entropy."""
        return RequiredScores(entropy=self.config.entropy_coef > 0 or self.config.top_entropy_quantile < 1)

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        config = self.config
        tokens = read_tokens(scores, batch, config)
        num_tokens = max(normalizer.num_valid_tokens, 1.0)
        token_weights = _token_weights(tokens.mask, batch, normalizer, config)

        token_loss = _policy_terms(self._term(tokens, config), tokens, config)
        kl = None
        if config.reference_policy_kl_penalty > 0:
            reference = torch.where(tokens.mask > 0, batch[keys.REFERENCE_LOGPROBS], 0.0)
            kl = weighted_kl(tokens.current, reference, tokens.generation, config)
            if not config.use_kl_in_reward:
                token_loss = token_loss + config.reference_policy_kl_penalty * kl
        loss = (token_loss * token_weights).sum()
        if tokens.entropy is not None:
            loss = loss - config.entropy_coef * tokens.entropy.sum() / num_tokens
        if config.positive_example_nll_weight > 0:
            positive_logprobs = (tokens.current * tokens.mask * (batch[keys.REWARD] > 0)[:, None]).sum()
            count = max(normalizer.num_positive_tokens, 1.0)
            loss = loss - config.positive_example_nll_weight * positive_logprobs / count

        terms = TokenTerms(
            current=tokens.current.detach(),
            prev=tokens.prev,
            generation=tokens.generation,
            mask=tokens.mask,
            ratio=tokens.ratio.detach(),
            clipped_ratio=tokens.clipped_ratio.detach(),
            sampling_weights=tokens.sampling_weights,
            out_of_bounds=tokens.out_of_bounds,
            kl=None if kl is None else (kl.detach() * token_weights).sum(),
        )
        metrics = loss_metrics(terms, num_tokens, batch[keys.SAMPLE_MASK])
        if tokens.entropy is not None:
            metrics["entropy"] = Metric(tokens.entropy.detach().sum() / num_tokens)
        return loss, metrics


def read_tokens(scores: TokenScores, batch: TrainingBatch, config: PolicyGradientLossConfig) -> PolicyTokens:
    """Return the tokens of a micro-batch with their current scores; entry 0 of a sequence carries no loss."""
    mask = loss_mask(batch)
    valid = mask > 0
    current = torch.where(valid, scores.logprobs.float(), 0.0)
    prev = batch.get(keys.PREV_LOGPROBS, None)
    prev = current.detach() if prev is None else torch.where(valid, prev, 0.0)
    generation = torch.where(valid, batch[keys.GENERATION_LOGPROBS], 0.0)

    base = current.detach() if config.force_on_policy_ratio else prev
    if config.ratio_against == "generation":
        base = generation
        valid = valid & base.isfinite()  # tokens without a log-prob of the engine carry no term
    # An overflow would make the gradient 0 * inf even if the ratio is clipped.
    log_ratio = torch.where(valid, current - base, 0.0).clamp(-MAX_EXP_INPUT, MAX_EXP_INPUT)
    of_sequence = log_ratio.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(of_sequence if config.is_sequence_level else log_ratio)
    weights, outside = sampling_weights(prev, generation, mask, config)
    return PolicyTokens(
        mask=mask,
        current=current,
        prev=prev,
        generation=generation,
        advantages=torch.where(valid, batch[keys.ADVANTAGES], 0.0),
        log_ratio=log_ratio,
        ratio=ratio,
        clipped_ratio=ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max),
        sampling_weights=weights,
        out_of_bounds=outside,
        entropy=None if scores.entropy is None else torch.where(valid, scores.entropy.float(), 0.0),
    )


def _policy_terms(term: torch.Tensor, tokens: PolicyTokens, config: PolicyGradientLossConfig) -> torch.Tensor:
    """Return the policy term of each token as the shared options leave it: [B, T]."""
    if config.off_policy_mask_threshold is not None:
        term = term * _is_near_policy(tokens, config.off_policy_mask_threshold)
    if config.top_entropy_quantile < 1:
        assert tokens.entropy is not None
        term = term * _has_high_entropy(tokens.entropy, tokens.mask, config.top_entropy_quantile)
    if config.log_ratio_penalty > 0:
        term = term + config.log_ratio_penalty * tokens.log_ratio.square()
    if config.use_importance_sampling_correction and config.weights_term:
        term = tokens.sampling_weights * term
    return term


@torch.no_grad()
def _is_near_policy(tokens: PolicyTokens, threshold: float) -> torch.Tensor:
    """Return False for tokens with A < 0 of sequences whose mean lp_gen - lp exceeds the threshold: [B, T] bool.

    The off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    num_tokens = (tokens.mask > 0).sum(-1, keepdim=True).clamp(min=1)
    distance = (tokens.generation - tokens.current).sum(-1, keepdim=True) / num_tokens
    return (tokens.advantages >= 0) | (distance <= threshold)


@torch.no_grad()
def _has_high_entropy(entropy: torch.Tensor, mask: torch.Tensor, share: float) -> torch.Tensor:
    """Return whether a token is among the `share` with the highest entropy of its micro-batch: [B, T] bool.

    arXiv 2506.01939. The bound is the quantile 1 - share, interpolated, inclusive.
    """
    valid = mask > 0
    values = entropy[valid]
    return valid & (entropy >= (values.quantile(1 - share) if len(values) else 0.0))


def _token_weights(
    mask: torch.Tensor, batch: TrainingBatch, normalizer: Normalizer, config: PolicyGradientLossConfig
) -> torch.Tensor:
    """Return the weight of each token in the step's loss: [B, T]."""
    if config.token_level_loss:
        return mask / max(normalizer.num_valid_tokens, 1.0)
    num_trajectories = max(normalizer.num_valid_trajectories, 1.0)
    if config.trajectory_token_divisor is not None:
        return mask / (config.trajectory_token_divisor * num_trajectories)
    return mask / (batch[keys.TRAJECTORY_TOKENS].clamp(min=1) * num_trajectories)[:, None]


@torch.no_grad()
def sampling_weights(
    prev_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, config: PolicyGradientLossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights exp(prev - generation) that correct for sampling by the engine, and the mask of truncation.

    All inputs are [B, T] and 0 where the mask is 0. Both results are [B, T], or [B, 1] for a sequence-level loss,
    whose weight is the exp of the sequence's sum. Neither has a gradient. Bounds are
    [truncated_importance_sampling_ratio_min or 0, truncated_importance_sampling_ratio]:

    - tis (also if no type is named): weights are clamped to the bounds;
    - icepop: weights outside are 0;
    - seq-mask-tis: all weights of a sequence whose geometric mean weight is outside are 0, others stay as they are;
    - sequence_truncate: each token has the product of its sequence's weights, clamped;
    - sequence_mask: the same, but 0 if the product is outside.

    Weights that are not finite become 0 before anything else.
    """
    log_weights = prev_logprobs - generation_logprobs  # [B, T]
    kind = config.truncated_importance_sampling_type
    has_product = config.is_sequence_level or kind in ("sequence_mask", "sequence_truncate")
    weights = finite_exp(log_weights.sum(-1, keepdim=True) if has_product else log_weights)
    high = config.truncated_importance_sampling_ratio
    if high is None:
        return weights, torch.zeros_like(weights)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    bounded = weights
    if kind == "seq-mask-tis":
        num_tokens = (mask > 0).sum(-1, keepdim=True).clamp(min=1)
        bounded = torch.exp(log_weights.sum(-1, keepdim=True) / num_tokens)  # [B, 1]
    outside = ~((bounded >= low) & (bounded <= high))
    if kind in ("icepop", "seq-mask-tis", "sequence_mask"):
        return weights.masked_fill(outside, 0.0), outside.float()
    return weights.clamp(low, high), outside.float()


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, config: PolicyGradientLossConfig
) -> torch.Tensor:
    """Return the estimate `reference_policy_kl_type` of each token, its log-ratio and itself clamped; has no weight."""
    log_ratio = _clamp(reference_logprobs - logprobs, config.kl_input_clamp_value)
    return _clamp(_estimate(log_ratio, config.reference_policy_kl_type), config.kl_output_clamp_value)


def weighted_kl(
    logprobs: torch.Tensor,
    reference_logprobs: torch.Tensor,
    generation_logprobs: torch.Tensor,
    config: PolicyGradientLossConfig,
) -> torch.Tensor:
    """Return the estimate of each token with the gradient that `reference_policy_kl_gradient` names.

    - score_function: the estimate times a weight that adds the score function's gradient to the estimate's own:
      exp(lp - stop_gradient(lp)), of value 1, or exp(lp - lp_gen) with `use_on_policy_kl_approximation`. If the
      log-ratio is clamped the weight carries no gradient: its direction is unknown there;
    - pathwise: the estimate's own gradient alone;
    - k2: the gradient of k2, which is the divergence's in expectation.
    """
    log_ratio = reference_logprobs - logprobs
    clamped = _clamp(log_ratio, config.kl_input_clamp_value)
    estimate = _estimate(clamped, config.reference_policy_kl_type)
    if config.reference_policy_kl_gradient == "score_function":
        behavior_logprobs = generation_logprobs if config.use_on_policy_kl_approximation else logprobs.detach()
        weight = finite_exp(logprobs - behavior_logprobs)
        if config.kl_input_clamp_value is not None:
            weight = torch.where(log_ratio.abs() > config.kl_input_clamp_value, weight.detach(), weight)
        estimate = weight * estimate
    elif config.reference_policy_kl_gradient == "k2":
        square = _estimate(clamped, "k2")
        estimate = estimate.detach() + square - square.detach()
    return _clamp(estimate, config.kl_output_clamp_value)


def _estimate(log_ratio: torch.Tensor, kl_type: str) -> torch.Tensor:
    if kl_type == "k1":
        return -log_ratio
    if kl_type == "k2":
        return log_ratio.square() / 2
    return torch.expm1(log_ratio) - log_ratio


def _clamp(x: torch.Tensor, bound: float | None) -> torch.Tensor:
    return x if bound is None else x.clamp(-bound, bound)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Values of a policy-gradient loss, without gradients: [B, T], the second group also [B, 1].

    Log-probs are 0 where the mask is 0.
    """

    current: torch.Tensor
    prev: torch.Tensor
    generation: torch.Tensor
    mask: torch.Tensor

    ratio: torch.Tensor
    clipped_ratio: torch.Tensor
    sampling_weights: torch.Tensor
    out_of_bounds: torch.Tensor

    kl: torch.Tensor | None  # a scalar: this micro-batch's part of the KL term, before its coefficient


@torch.no_grad()
def loss_metrics(terms: TokenTerms, num_valid_tokens: float, sample_mask: torch.Tensor) -> dict[str, Metric]:
    """Return the metrics of one micro-batch; `num_valid_tokens` is the optimizer step's.

    With e = lp_prev - lp_gen: token_mult_prob_error exp(|e|), gen_kl_error k3(e), policy_kl_error k3(-e),
    js_divergence_error the mean of both sides' k3 against the mixture (p_prev + p_gen) / 2, approx_entropy
    -exp(lp - lp_gen) lp. If the engine's log-prob is not finite, e counts as 0 and the token is counted in
    num_nonfinite_generation_logprobs. Minima and maxima of a micro-batch without a valid token are +-inf.
    """
    error, nonfinite = _errors(terms.prev, terms.generation)
    means = {
        "probs_ratio": terms.ratio,
        "probs_ratio_clamped": terms.clipped_ratio,
        **_error_terms(error),
        "sampling_importance_ratio": terms.sampling_weights,
        "is_oob_ratio": terms.out_of_bounds,
        "approx_entropy": -finite_exp(terms.current - terms.generation) * terms.current,
    }
    means = {name: x.expand_as(terms.mask) for name, x in means.items()}
    metrics = _mean_metrics(means, terms.mask, num_valid_tokens)
    metrics["kl_penalty"] = Metric(torch.zeros_like(error[0, 0]) if terms.kl is None else terms.kl)
    metrics["num_valid_samples"] = Metric(sample_mask.sum(), "count")
    metrics["num_nonfinite_generation_logprobs"] = Metric(nonfinite.sum(), "count")

    masked = terms.mask == 0
    for name in ("probs_ratio", "probs_ratio_clamped"):
        metrics[f"{name}_min"] = Metric(means[name].masked_fill(masked, math.inf).amin(), "min")
        metrics[f"{name}_max"] = Metric(means[name].masked_fill(masked, -math.inf).amax(), "max")
    metrics["max_logprob_error"] = Metric(error.abs().amax(), "max")
    return metrics


@torch.no_grad()
def engine_mismatch_metrics(
    logprobs: torch.Tensor, generation: torch.Tensor, mask: torch.Tensor, num_valid_tokens: float
) -> dict[str, Metric]:
    """Return the metrics of `loss_metrics` that compare trainer and engine, for losses without a ratio.

    All inputs are [B, T].
    """
    current, generation = torch.where(mask > 0, logprobs, 0.0), torch.where(mask > 0, generation, 0.0)
    error, nonfinite = _errors(current, generation)
    means = {**_error_terms(error), "approx_entropy": -finite_exp(current - generation) * current}
    metrics = _mean_metrics(means, mask, num_valid_tokens)
    metrics["num_nonfinite_generation_logprobs"] = Metric(nonfinite.sum(), "count")
    metrics["max_logprob_error"] = Metric(error.abs().amax(), "max")
    return metrics


def _errors(logprobs: torch.Tensor, generation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lp - lp_gen, 0 if the engine's log-prob is not finite, and the mask of those tokens."""
    error = logprobs - generation
    nonfinite = ~error.isfinite()
    return error.masked_fill(nonfinite, 0.0).clamp(-MAX_EXP_INPUT, MAX_EXP_INPUT), nonfinite


def _error_terms(error: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "token_mult_prob_error": torch.exp(error.abs()),
        "gen_kl_error": _k3(error),
        "policy_kl_error": _k3(-error),
        "js_divergence_error": _jensen_shannon(error),
    }


def _mean_metrics(terms: dict[str, torch.Tensor], mask: torch.Tensor, num_valid_tokens: float) -> dict[str, Metric]:
    """Return the weighted means of [B, T] terms, computed in one product."""
    stacked = torch.stack(list(terms.values()))  # [K, B, T]
    values = stacked.flatten(1) @ mask.flatten() / num_valid_tokens
    return {name: Metric(value) for name, value in zip(terms, values.unbind(), strict=True)}


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _jensen_shannon(error: torch.Tensor) -> torch.Tensor:
    """Return the mean of both sides' k3 against the mixture; log p - log mixture depends on the error alone."""
    log_mixture_gain = math.log(2.0)
    prev_to_mixture = log_mixture_gain - torch.nn.functional.softplus(-error)
    generation_to_mixture = log_mixture_gain - torch.nn.functional.softplus(error)
    return (_k3(prev_to_mixture) + _k3(generation_to_mixture)) / 2


def finite_exp(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x), but 0 if that is not finite; the gradient is finite everywhere."""
    return torch.exp(torch.where(x < MAX_EXP_INPUT, x, float("-inf")))
