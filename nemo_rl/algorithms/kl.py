"""Estimates, a token at a time, of the KL divergence from the policy to the reference.

With d = log p_reference - log p: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d (Schulman, "Approximating KL divergence").
"""

import torch

from nemo_rl.algorithms.importance import finite_exp
from nemo_rl.config.loss import LossConfig


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
