"""Log-probs and entropies of rows of logits, and the gradient of the logits, which overwrites them.

N rows, V vocabulary, v the part of it on one rank, K chosen tokens per row. With logits z, lp = z - logsumexp(z) and
p = exp(lp): H = -sum p lp, d lp_k / dz = 1_k - p, d H / dz = -p (lp + H). `row_statistics` and `logits_gradient` are
the two passes over [N, V]: PyTorch's operations on blocks of rows here, one Triton kernel each on CUDA
(log_softmax_kernels.py). All callers get the faster one that the device has.
"""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from nemo_rl.policy.truncation import VocabularyShard

logger = logging.getLogger(__name__)

# Numbers per block of rows. On a CPU a block stays in its cache; on a GPU each operation is a launch, and a chunk of
# 1,024 positions of 150k tokens is three blocks with intermediate results of 256 MiB each.
CPU_BLOCK, ACCELERATOR_BLOCK = 2**22, 2**26
KERNEL_TOLERANCE = 1e-4  # for the kernels' log-probs and gradients on logits of a few units


class RowStatistics(NamedTuple):
    """Results of one pass over the rows of scaled logits, in their dtype."""

    log_total: torch.Tensor  # [N] log-sum-exp
    entropy: torch.Tensor  # [N] nats; 0 unless requested
    chosen: torch.Tensor  # [N, K] scaled logits of the chosen tokens

    def part(self, rows: slice) -> "RowStatistics":
        return RowStatistics(*(values[rows] for values in self))


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients of a loss with respect to the scores of N rows."""

    logprobs: torch.Tensor  # [N, K] of the chosen tokens; 0 for those of another rank's shard
    total: torch.Tensor  # [N] sum over all chosen tokens, those of other shards included
    entropy: torch.Tensor | None  # [N]

    @classmethod
    def of(cls, logprobs: torch.Tensor, entropy: torch.Tensor | None) -> "RowGradients":
        """Return the gradients of rows whose chosen tokens are all in the logits."""
        return cls(logprobs, logprobs.sum(-1), entropy)

    def part(self, rows: slice) -> "RowGradients":
        return RowGradients(self.logprobs[rows], self.total[rows], None if self.entropy is None else self.entropy[rows])


def row_statistics(
    logits: torch.Tensor, ids: torch.Tensor, *, scale: float = 1.0, entropy: bool = False
) -> RowStatistics:
    """Return the statistics of [N, V] logits times `scale`, and the scaled logits of `ids` [N, K]."""
    if _uses_kernels(logits):
        from nemo_rl.policy import log_softmax_kernels

        return RowStatistics(*log_softmax_kernels.row_statistics(logits, ids, scale, entropy))
    return row_statistics_in_blocks(logits, ids, scale=scale, entropy=entropy)


def logits_gradient(
    logits: torch.Tensor,
    ids: torch.Tensor,
    statistics: RowStatistics,
    gradients: RowGradients,
    *,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the gradient of unscaled logits [N, V] in `dtype` (None: theirs), in which case it overwrites them.

    The contents of `logits` are undefined after the call.
    """
    dtype = dtype or logits.dtype
    if _uses_kernels(logits):
        return _gradient_by_kernel(logits, ids, statistics, gradients, scale, dtype)
    return logits_gradient_in_blocks(logits, ids, statistics, gradients, scale=scale).to(dtype)


def row_statistics_in_blocks(
    logits: torch.Tensor, ids: torch.Tensor, *, scale: float = 1.0, entropy: bool = False
) -> RowStatistics:
    """Return the same as `row_statistics`, by PyTorch's operations."""
    log_total, entropies = logits.new_zeros(len(logits)), logits.new_zeros(len(logits))
    for rows in _row_blocks(logits):
        block = logits[rows] if scale == 1.0 else logits[rows] * scale
        log_total[rows] = block.logsumexp(-1)
        if entropy:
            logprobs = block - log_total[rows].unsqueeze(1)
            entropies[rows] = -logprobs.exp().mul_(logprobs).sum(-1)
    chosen = logits.gather(1, ids)
    return RowStatistics(log_total, entropies, chosen if scale == 1.0 else chosen.mul_(scale))


def logits_gradient_in_blocks(
    logits: torch.Tensor, ids: torch.Tensor, statistics: RowStatistics, gradients: RowGradients, *, scale: float = 1.0
) -> torch.Tensor:
    """Return the logits overwritten by their gradient, by PyTorch's operations."""
    for rows in _row_blocks(logits):
        part = gradients.part(rows)
        block = logits[rows] if scale == 1.0 else logits[rows].mul_(scale)
        logprobs = block.sub_(statistics.log_total[rows].unsqueeze(1))
        factor = -part.total.unsqueeze(1)
        if part.entropy is not None:
            factor = factor - part.entropy.unsqueeze(1) * (logprobs + statistics.entropy[rows].unsqueeze(1))
        block = logprobs.exp_().mul_(factor).scatter_add_(1, ids[rows], part.logprobs)
        if scale != 1.0:
            block.mul_(scale)
    return logits


def logprobs_and_entropy(
    logits: torch.Tensor, ids: torch.Tensor, *, entropy: bool = False, shard: VocabularyShard | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log_softmax(logits) of `ids`, and the entropy of each row in nats.

    Args:
        logits: [N, V] float32, [N, v] of a `shard`; overwritten by the backward pass, so nothing else may use them.
        ids: [N, K] int64, of the whole vocabulary.
        entropy: compute it; otherwise zeros are returned.
        shard: the part of the vocabulary that the logits belong to; None: all of it. Results, and the gradients that
            they get, are the same on every rank.

    Returns:
        [N, K] and [N], float32.
    """
    return _LogprobsAndEntropy.apply(logits, ids, entropy, shard)  # type: ignore[return-value]


class _LogprobsAndEntropy(torch.autograd.Function):
    """With a shard, a rank has statistics of its part, and computes the gradient of its part alone.

    A rank whose part has log-sum-exp l and entropy h adds exp(l - L) (h + L - l) to the entropy, for L of all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, wants_entropy: bool, shard: VocabularyShard | None
    ) -> Any:
        is_here = None
        if shard is not None:
            ids = ids - shard.first
            is_here = (ids >= 0) & (ids < logits.shape[1])
            ids = ids.clamp(0, logits.shape[1] - 1)
        log_total, entropy, chosen = row_statistics(logits, ids, entropy=wants_entropy)
        if shard is not None and is_here is not None:
            own_total, log_total = log_total, torch.stack(shard.all_gather(log_total)).logsumexp(0)
            below = log_total - own_total
            entropy = (entropy + below) * (-below).exp() if wants_entropy else entropy
            chosen = (chosen - log_total.unsqueeze(1)).masked_fill_(~is_here, 0.0)
            summed = shard.all_reduce_sum(torch.cat([chosen, entropy.unsqueeze(1)], dim=1))
            logprobs, entropy = summed[:, :-1].contiguous(), summed[:, -1].contiguous()
        else:
            logprobs = chosen - log_total.unsqueeze(1)
        ctx.save_for_backward(logits, ids, log_total, entropy, is_here)
        ctx.wants_entropy = wants_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:
        logits, ids, log_total, entropy, is_here = ctx.saved_tensors
        of_ids = grad_logprobs if is_here is None else grad_logprobs.masked_fill(~is_here, 0.0)
        gradients = RowGradients(of_ids, grad_logprobs.sum(-1), grad_entropy if ctx.wants_entropy else None)
        statistics = RowStatistics(log_total, entropy, of_ids)
        # The same memory: autograd refuses a second pass through it.
        return logits_gradient(logits.detach(), ids, statistics, gradients), None, None, None


def _gradient_by_kernel(
    logits: torch.Tensor,
    ids: torch.Tensor,
    statistics: RowStatistics,
    gradients: RowGradients,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    from nemo_rl.policy import log_softmax_kernels

    result = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    rows = statistics.log_total, statistics.entropy, gradients.logprobs, gradients.total, gradients.entropy
    log_softmax_kernels.logits_gradient(logits, result, ids, *rows, scale)
    return result


def _row_blocks(logits: torch.Tensor) -> Iterator[slice]:
    block = CPU_BLOCK if logits.device.type == "cpu" else ACCELERATOR_BLOCK
    size = max(1, block // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _uses_kernels(logits: torch.Tensor) -> bool:
    is_readable = logits.is_cuda and logits.dtype == torch.float32 and logits.stride(1) == 1
    return is_readable and has_kernels(logits.device)


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run on the CUDA device, and agree there with PyTorch's operations.

    Triton needs a C compiler and Python's headers; the first call for a device compiles both kernels.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _check_kernels(device)


@functools.cache
def _check_kernels(device: torch.device) -> bool:
    try:
        difference = kernel_error(device)
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    except Exception as error:  # Triton, the C compiler that it calls, or the driver  # noqa: BLE001
        logger.warning(
            "Triton kernels of log-probs do not run (%s: %s); falling back to PyTorch's operations (slower)",
            type(error).__name__,
            error,
        )
        return False
    if not difference <= KERNEL_TOLERANCE:  # NaN too
        logger.warning(
            "Triton kernels of log-probs are wrong by %.2g on this device; falling back to PyTorch's operations "
            "(slower)",
            difference,
        )
        return False
    return True


def kernel_error(device: torch.device) -> float:
    """Return the largest difference between kernels and PyTorch's operations, on random logits of several blocks.

    For chosen tokens that repeat, with and without entropy, in float32 and in bfloat16, whose rounding counts less.
    Without entropy, a row begins with a block of tokens that are masked by -inf.
    """
    from nemo_rl.policy import log_softmax_kernels

    generator = torch.Generator().manual_seed(0)
    shape, scale = (7, 2 * log_softmax_kernels.BLOCK + 5), 0.7
    logits = (3 * torch.randn(shape, generator=generator, device="cpu")).to(device)
    ids = torch.randint(shape[1], (shape[0], 3), generator=generator, device="cpu").to(device)
    ids[0] = ids[0, 0]
    grad_logprobs = torch.randn(ids.shape, generator=generator, device="cpu").to(device)
    grad_entropy = torch.randn(shape[0], generator=generator, device="cpu").to(device)
    ids[1] = shape[1] - 1
    masked = logits.clone()
    masked[1, : log_softmax_kernels.BLOCK] = float("-inf")
    error = 0.0
    for logits, entropy in ((masked, False), (logits, True)):  # noqa: B020
        expected = row_statistics_in_blocks(logits, ids, scale=scale, entropy=entropy)
        found = log_softmax_kernels.row_statistics(logits, ids, scale, entropy)
        differences = [own - other for own, other in zip(found, expected, strict=True)]
        gradients = RowGradients.of(grad_logprobs, grad_entropy if entropy else None)
        exact = logits_gradient_in_blocks(logits.clone(), ids, expected, gradients, scale=scale)
        for dtype, rounding in ((torch.float32, 1.0), (torch.bfloat16, 2.0**-8)):
            result = _gradient_by_kernel(logits.clone(), ids, expected, gradients, scale, dtype)
            differences.append((result.float() - exact) * rounding)
        error = max(error, *(float(part.abs().max()) for part in differences))
    return error
