"""Sequences on which the trainer and the engine disagree are taken from the gradient."""

import torch

from nemo_rl import batch as keys
from nemo_rl.types import TrainingBatch


def sequence_logprob_errors(batch: TrainingBatch) -> torch.Tensor:
    """exp(mean over the sampled tokens of |lp_prev - lp_gen|) of each sample: [B]; NaN where a log-prob is."""
    mask = batch[keys.TOKEN_MASK]
    error = torch.where(mask > 0, (batch[keys.PREV_LOGPROBS] - batch[keys.GENERATION_LOGPROBS]).abs(), 0.0)
    return torch.exp(error.sum(-1) / mask.sum(-1).clamp(min=1))


@torch.no_grad()
def mask_logprob_errors(batch: TrainingBatch, threshold: float) -> dict[str, float]:
    """Set `sample_mask` to 0 where a sequence's error exceeds `grpo.seq_logprob_error_threshold`, or is no number.

    Metrics are over the samples with a gradient: max_ and mean_seq_mult_prob_error before and
    max_seq_mult_prob_error_after_mask after it, num_masked_seqs_by_logprob_error, and masked_correct_pct, the share
    of the masked samples that had a positive reward (0..1; 0 where none was masked).
    """
    errors = sequence_logprob_errors(batch)
    trained = batch[keys.SAMPLE_MASK] > 0
    kept = trained & (errors <= threshold)
    masked = trained & ~kept
    batch[keys.SAMPLE_MASK] = batch[keys.SAMPLE_MASK] * kept
    correct = masked & (batch[keys.REWARD] > 0)
    finite = torch.nan_to_num(errors, nan=torch.finfo(errors.dtype).max)
    return {
        "max_seq_mult_prob_error": _max(finite[trained]),
        "mean_seq_mult_prob_error": float(finite[trained].double().mean()) if trained.any() else 1.0,
        "max_seq_mult_prob_error_after_mask": _max(finite[kept]),
        "num_masked_seqs_by_logprob_error": float(masked.sum()),
        "masked_correct_pct": float(correct.sum() / masked.sum().clamp(min=1)),
    }


def _max(errors: torch.Tensor) -> float:
    """1, no error at all, where there is no sequence."""
    return float(errors.max()) if len(errors) else 1.0
