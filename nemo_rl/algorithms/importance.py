"""Importance weights between the training backend's log-probs and the engine's that sampled the tokens."""

import torch

from nemo_rl.config.loss import LossConfig

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
