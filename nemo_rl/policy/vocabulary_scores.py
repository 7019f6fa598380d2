"""Log-probs of some tokens of each distribution, and entropies, in little more memory than the logits themselves.

A log-softmax [N, V] and its gradient would each take as much again. Here rows are worked on a few at a time, and the
gradient is written over the logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

BLOCK = 2**22  # numbers of a block of rows


def logprobs_and_entropy(
    logits: torch.Tensor, ids: torch.Tensor, *, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits) of `ids`, and the entropy of each row in nats.

    Args:
        logits: [N, V] float32; the backward pass overwrites them, so nobody else may need them then.
        ids: [N, K] int64.
        entropy: whether it is wanted; else zeros.

    Returns:
        [N, K] and [N], float32.
    """
    return _Scores.apply(logits, ids, entropy)  # type: ignore[return-value]


class _Scores(torch.autograd.Function):
    """With lp = log_softmax(z) and p = exp(lp): d lp_k / dz = 1_k - p, and d H / dz = -p (lp + H)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ids: torch.Tensor, wants_entropy: bool) -> Any:
        log_total, entropy = logits.new_zeros(len(logits)), logits.new_zeros(len(logits))
        for rows in _blocks(logits):
            total = log_total[rows] = logits[rows].logsumexp(-1)
            if wants_entropy:
                logprobs = logits[rows] - total.unsqueeze(1)
                entropy[rows] = -logprobs.exp().mul_(logprobs).sum(-1)
        ctx.save_for_backward(logits, ids, log_total, entropy)
        ctx.wants_entropy = wants_entropy
        return logits.gather(1, ids) - log_total.unsqueeze(1), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: torch.Tensor, of_entropy: torch.Tensor) -> Any:
        logits, ids, log_total, entropy = ctx.saved_tensors
        gradient = logits.detach()  # the same memory; autograd refuses a second pass through it
        for rows in _blocks(logits):
            logprobs = gradient[rows].sub_(log_total[rows].unsqueeze(1))
            factor = -of_logprobs[rows].sum(-1, keepdim=True)
            if ctx.wants_entropy:
                factor = factor - of_entropy[rows].unsqueeze(1) * (logprobs + entropy[rows].unsqueeze(1))
            logprobs.exp_().mul_(factor).scatter_add_(1, ids[rows], of_logprobs[rows])
        return gradient, None, None


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    size = max(1, BLOCK // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
