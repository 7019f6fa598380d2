"""Log-probs and entropies from hidden states, output layer and log-softmax in one function with its own backward pass.

N positions, H hidden size, V vocabulary, K chosen tokens per position. Float32 logits of at most a chunk of positions
exist. Each pass computes them with one matrix product and reads them once; the backward pass turns them into their
gradient in place, and adds each chunk's product to the gradient of the weight. It is for output layers that are a plain
matrix; policy/logprobs.py scores the others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.float32 import float32_product
from nemo_rl.policy.log_softmax import RowGradients, RowStatistics, logits_gradient, row_statistics


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """Options of the scoring of hidden states."""

    scale: float  # factor of the logits
    entropy: bool  # compute it; otherwise zeros are returned
    chunk_size: int | None  # positions whose logits exist at once; None: all


def is_plain_matrix(output_layer: nn.Module, hidden: torch.Tensor) -> bool:
    """Return whether the output layer is a product with a whole matrix of the hidden states' dtype, and no more."""
    if type(output_layer) is not nn.Linear or output_layer.bias is not None:
        return False
    weight = output_layer.weight
    return (
        not isinstance(weight, DTensor)
        and weight.dtype == hidden.dtype
        and not torch.is_autocast_enabled(hidden.device.type)
    )


def linear_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: LinearOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log_softmax(scale * hidden @ weight.T) of `ids` [N, K], and the entropy of each row in nats [N].

    Logits of bfloat16 are in float32 (distributed/float32.py); their gradient is rounded to bfloat16. The logits of a
    single chunk are kept for the backward pass; those of several are computed again.

    Args:
        hidden: [N, H] bfloat16, float32 or float64.
        weight: [V, H] of the same dtype.
        ids: [N, K] int64.
        options: scale, chunks and whether the entropy is computed.
    """
    return _LinearLogprobs.apply(hidden, weight, ids, options)  # type: ignore[return-value]


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, options: LinearOptions) -> Any:
        chunks = list(_chunks(len(hidden), options.chunk_size))
        parts: list[RowStatistics] = []
        logits = None
        for rows in chunks:
            del logits  # before the next ones exist
            logits = _logits(hidden[rows], weight)
            parts.append(row_statistics(logits, ids[rows], scale=options.scale, entropy=options.entropy))
        log_total, entropy, chosen = map(torch.cat, zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, ids, log_total, entropy, logits if len(chunks) == 1 else None)
        ctx.options = options
        return chosen - log_total.unsqueeze(1), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:
        hidden, weight, ids, log_total, entropy, kept = ctx.saved_tensors
        options: LinearOptions = ctx.options
        statistics = RowStatistics(log_total, entropy, grad_logprobs)
        gradients = RowGradients.of(grad_logprobs, grad_entropy if options.entropy else None)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight: torch.Tensor | None = None
        for rows in _chunks(len(hidden), options.chunk_size):
            gradient = logits_gradient(
                _logits(hidden[rows], weight) if kept is None else kept.detach(),
                ids[rows],
                statistics.part(rows),
                gradients.part(rows),
                scale=options.scale,
                dtype=weight.dtype,
            )
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[rows])
            if needs_weight and of_weight is None:
                of_weight = gradient.T @ hidden[rows]
            elif of_weight is not None:
                of_weight.addmm_(gradient.T, hidden[rows])
            del gradient  # before the next chunk's logits exist
        return of_hidden, of_weight, None, None


def _chunks(length: int, size: int | None) -> Iterator[slice]:
    """Yield ranges of at most `size` positions, at least one range."""
    size = size or max(length, 1)
    return (slice(start, start + size) for start in range(0, max(length, 1), size))


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return float32_product(hidden, weight) if hidden.dtype == torch.bfloat16 else hidden @ weight.T
