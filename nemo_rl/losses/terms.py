"""Per-token terms that losses share: importance weights, KL estimates and the metrics derived from them."""

import math
from dataclasses import dataclass

import torch

from nemo_rl.config.loss import LossConfig
from nemo_rl.interfaces import Metric

MAX_EXP_INPUT = 88.0  # exp of it is still finite in float32


def finite_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x), but 0 where that is not finite; the gradient is finite everywhere."""
    return torch.exp(torch.where(x < MAX_EXP_INPUT, x, float("-inf")))


def sampling_weights(
    prev_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, mask: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights exp(prev - generation) that correct for sampling by the engine, and where they left their bounds.

    All inputs are [B, T] and 0 where the mask is 0. Both results are [B, T], or [B, 1] where all tokens of a
    sequence share them: with `sequence_level_importance_ratios` the weight is the exp of the sequence's sum. Bounds
    are [truncated_importance_sampling_ratio_min or 0, truncated_importance_sampling_ratio]:

    - tis (also where no type is named): weights are clamped to the bounds;
    - icepop: weights outside are 0;
    - seq-mask-tis: all weights of a sequence whose geometric mean weight is outside are 0, others stay as they are.

    Weights that are not finite become 0 before anything else.
    """
    log_weights = prev_logprobs - generation_logprobs  # [B, T]
    if config.sequence_level_importance_ratios:
        weights = finite_exp(log_weights.sum(-1, keepdim=True))  # [B, 1]
    else:
        weights = finite_exp(log_weights)
    high = config.truncated_importance_sampling_ratio
    if high is None:
        return weights, torch.zeros_like(weights)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    bounded = weights
    if config.truncated_importance_sampling_type == "seq-mask-tis":
        num_tokens = (mask > 0).sum(-1, keepdim=True).clamp(min=1)
        bounded = torch.exp(log_weights.sum(-1, keepdim=True) / num_tokens)  # [B, 1]
    outside = ~((bounded >= low) & (bounded <= high))
    if config.truncated_importance_sampling_type in ("icepop", "seq-mask-tis"):
        return weights.masked_fill(outside, 0.0), outside.float()
    return weights.clamp(low, high), outside.float()


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """The estimator `reference_policy_kl_type` with d and the result clamped: for use as a number, without a weight."""
    log_ratio = _clamp(reference_logprobs - logprobs, config.kl_input_clamp_value)
    return _clamp(_estimate(log_ratio, config.reference_policy_kl_type), config.kl_output_clamp_value)


def weighted_kl(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """The estimate times an importance weight whose gradient is the score function's, so that both parts are trained.

    The weight is exp(lp - stop_gradient(lp)), of value 1, or exp(lp - lp_gen) with `use_on_policy_kl_approximation`.
    Where d is clamped the weight carries no gradient: such a token tells nothing of where to go.
    """
    log_ratio = reference_logprobs - logprobs
    clamped = _clamp(log_ratio, config.kl_input_clamp_value)
    behavior_logprobs = generation_logprobs if config.use_on_policy_kl_approximation else logprobs.detach()
    weight = finite_exp(logprobs - behavior_logprobs)
    if config.kl_input_clamp_value is not None:
        weight = torch.where(log_ratio.abs() > config.kl_input_clamp_value, weight.detach(), weight)
    return _clamp(weight * _estimate(clamped, config.reference_policy_kl_type), config.kl_output_clamp_value)


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
    """Without gradients, [B, T] (the second group also [B, 1]), log-probs 0 where the mask is 0."""

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
    """Metrics of one micro-batch; `num_valid_tokens` is the optimizer step's.

    With e = lp_prev - lp_gen: token_mult_prob_error exp(|e|), gen_kl_error k3(e), policy_kl_error k3(-e),
    js_divergence_error the mean of both sides' k3 against the mixture (p_prev + p_gen) / 2, approx_entropy
    -exp(lp - lp_gen) lp. Where the engine's log-prob is not finite, e counts as 0 and the token is counted in
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
    """Those of `loss_metrics` that tell trainer from engine, for losses without a ratio; all [B, T]."""
    current, generation = torch.where(mask > 0, logprobs, 0.0), torch.where(mask > 0, generation, 0.0)
    error, nonfinite = _errors(current, generation)
    means = {**_error_terms(error), "approx_entropy": -finite_exp(current - generation) * current}
    metrics = _mean_metrics(means, mask, num_valid_tokens)
    metrics["num_nonfinite_generation_logprobs"] = Metric(nonfinite.sum(), "count")
    metrics["max_logprob_error"] = Metric(error.abs().amax(), "max")
    return metrics


def _errors(logprobs: torch.Tensor, generation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """lp - lp_gen, 0 where the engine's is not finite, and where that is."""
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
    """Of [B, T] terms, in one product."""
    stacked = torch.stack(list(terms.values()))  # [K, B, T]
    values = stacked.flatten(1) @ mask.flatten() / num_valid_tokens
    return {name: Metric(value) for name, value in zip(terms, values.unbind(), strict=True)}


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _jensen_shannon(error: torch.Tensor) -> torch.Tensor:
    """Half the k3 of either side against the mixture; log p - log mixture depends on the error alone."""
    log_mixture_gain = math.log(2.0)
    prev_to_mixture = log_mixture_gain - torch.nn.functional.softplus(-error)
    generation_to_mixture = log_mixture_gain - torch.nn.functional.softplus(error)
    return (_k3(prev_to_mixture) + _k3(generation_to_mixture)) / 2
