"""Metrics that losses report of a micro-batch: ratios, importance weights, and how far trainer and engine differ."""

import math
from dataclasses import dataclass

import torch

from nemo_rl.interfaces import Metric

MAX_EXP_INPUT = 88.0  # exp of it is still finite in float32


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
    """Return lp - lp_gen, 0 where the engine's log-prob is not finite, and the mask of those tokens."""
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
    """Return exp(x), but 0 where that is not finite; the gradient is finite everywhere."""
    return torch.exp(torch.where(x < MAX_EXP_INPUT, x, float("-inf")))
