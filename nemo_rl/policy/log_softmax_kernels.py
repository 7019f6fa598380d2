"""Triton kernels of log_softmax.py: one read of the logits for the statistics, one read and write for the gradient.

A program has a row of V logits and reads it in blocks. Both are operators of PyTorch, so that fake tensors and
torch.compile know them. Only imported to run them, or to check them in Triton's interpreter: it needs Triton.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096  # logits per iteration: 16 numbers for each thread of 8 warps
NUM_WARPS = 8


@triton.jit
def statistics_kernel(
    logits,
    ids,
    log_totals,
    entropies,
    chosen,
    row_stride,
    num_tokens,
    num_ids,
    scale,
    WANTS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
):
    """Store log-sum-exp, entropy and chosen logits of a row, which online sums (arXiv 1805.02867) read once.

    With the largest logit m and s = sum exp(z - m), the entropy is log s - sum exp(z - m) (z - m) / s.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    weighted = tl.full([], 0.0, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(source + at, mask=at < num_tokens, other=float("-inf")).to(tl.float32) * scale
        new_largest = tl.maximum(largest, tl.max(values, axis=0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # so far all tokens may be masked by -inf
        shares = tl.exp(values - base)
        shrink = tl.exp(largest - base)
        if WANTS_ENTROPY:
            moved = tl.where(total > 0, largest - base, 0.0)
            distances = tl.where(shares > 0, values - base, 0.0)
            weighted = shrink * (weighted + total * moved) + tl.sum(shares * distances, axis=0)
        total = total * shrink + tl.sum(shares, axis=0)
        largest = new_largest
    tl.store(log_totals + row, largest + tl.log(total))
    if WANTS_ENTROPY:
        tl.store(entropies + row, tl.log(total) - weighted / total)
    slots = tl.arange(0, IDS)
    own = tl.load(ids + row * num_ids + slots, mask=slots < num_ids, other=0)
    of_own = tl.load(source + own, mask=slots < num_ids, other=0.0).to(tl.float32) * scale
    tl.store(chosen + row * num_ids + slots, of_own, mask=slots < num_ids)


@triton.jit
def gradient_kernel(
    logits,
    gradient,
    ids,
    log_totals,
    entropies,
    grad_logprobs,
    grad_totals,
    grad_entropies,
    row_stride,
    result_stride,
    num_tokens,
    num_ids,
    scale,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    IDS: tl.constexpr,
):
    """Store a row of the gradient, which may be where the logits are.

    All tokens get the part of p; then the chosen ones are stored again, each with all gradients of its id: bfloat16
    would lose what is left of nearly equal parts.
    """
    row = tl.program_id(0).to(tl.int64)
    source, target = logits + row * row_stride, gradient + row * result_stride
    log_total, grad_total = tl.load(log_totals + row), tl.load(grad_totals + row)
    entropy, grad_entropy = 0.0, 0.0
    if HAS_ENTROPY:
        entropy, grad_entropy = tl.load(entropies + row), tl.load(grad_entropies + row)
    slots = tl.arange(0, IDS)
    is_used = slots < num_ids
    own = tl.load(ids + row * num_ids + slots, mask=is_used, other=-1)
    chosen = tl.load(source + own, mask=is_used, other=0.0).to(tl.float32) * scale - log_total
    factors = grad_total + tl.zeros_like(chosen)
    if HAS_ENTROPY:
        factors += grad_entropy * (chosen + entropy)
    of_chosen = -tl.exp(chosen) * factors
    for index in range(num_ids):
        other = tl.load(ids + row * num_ids + index)
        of_chosen += tl.where(own == other, tl.load(grad_logprobs + row * num_ids + index), 0.0)
    tl.debug_barrier()  # the chosen logits are read before any thread overwrites them
    for start in range(0, num_tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logprobs = tl.load(source + at, mask=at < num_tokens, other=0.0).to(tl.float32) * scale - log_total
        factors_here = grad_total + tl.zeros_like(logprobs)
        if HAS_ENTROPY:
            factors_here += grad_entropy * (logprobs + entropy)
        values = -tl.exp(logprobs) * factors_here * scale
        tl.store(target + at, values.to(gradient.dtype.element_ty), mask=at < num_tokens)
    tl.debug_barrier()  # the chosen tokens are stored after every thread has stored its part
    tl.store(target + own, (of_chosen * scale).to(gradient.dtype.element_ty), mask=is_used)


@torch.library.custom_op("nemo_rl::row_statistics", mutates_args=())
def row_statistics(
    logits: torch.Tensor, ids: torch.Tensor, scale: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-sum-exp [N], entropy [N] (0 unless requested) and scaled logits of `ids` [N, K], in float32."""
    results = _empty_statistics(logits, ids, scale, entropy)
    if len(logits) > 0:
        with torch.cuda.device_of(logits):
            launch: Any = statistics_kernel[(len(logits),)]
            launch(
                logits,
                ids.contiguous(),
                *results,
                logits.stride(0),
                logits.shape[1],
                ids.shape[1],
                scale,
                WANTS_ENTROPY=entropy,
                BLOCK=BLOCK,
                IDS=triton.next_power_of_2(ids.shape[1]),
                num_warps=NUM_WARPS,
            )
    return results


@row_statistics.register_fake
def _empty_statistics(
    logits: torch.Tensor, ids: torch.Tensor, scale: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make_entropy = torch.empty if entropy else torch.zeros
    options = {"dtype": torch.float32, "device": logits.device}
    return (
        torch.empty(len(logits), **options),
        make_entropy(len(logits), **options),
        torch.empty(ids.shape, **options),
    )


@torch.library.custom_op("nemo_rl::logits_gradient", mutates_args=("result",))
def logits_gradient(
    logits: torch.Tensor,
    result: torch.Tensor,
    ids: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_total: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    scale: float,
) -> None:
    """Write the gradient of unscaled logits [N, V] to `result`, which may be the logits themselves."""
    if len(logits) > 0:
        with torch.cuda.device_of(logits):
            launch: Any = gradient_kernel[(len(logits),)]
            launch(
                logits,
                result,
                ids.contiguous(),
                log_total,
                entropy,
                grad_logprobs.contiguous(),
                grad_total.contiguous(),
                entropy if grad_entropy is None else grad_entropy.contiguous(),
                logits.stride(0),
                result.stride(0),
                logits.shape[1],
                ids.shape[1],
                scale,
                HAS_ENTROPY=grad_entropy is not None,
                BLOCK=BLOCK,
                IDS=triton.next_power_of_2(ids.shape[1]),
                num_warps=NUM_WARPS,
            )


@logits_gradient.register_fake
def _write_nothing(*args: object) -> None:
    return None
