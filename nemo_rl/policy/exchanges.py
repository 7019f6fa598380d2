"""Collectives of rows with gradients: an all-to-all that autograd reverses, and a gathering that each rank cuts."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def exchange_rows(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the rows that the ranks send to this one, `received` from each, for `sent` of its own to each."""
    return cast(torch.Tensor, _Exchange.apply(rows, list(received), list(sent), group))


def gather_rows(rows: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks in order, `sizes` of each, of which this `rank` gives its own.

    All ranks must compute the same from them: the gradient of a rank's own rows is its own, and not a sum over
    ranks.
    """
    return cast(torch.Tensor, _Gather.apply(rows, tuple(sizes), rank, group))


class _Exchange(torch.autograd.Function):
    """All-to-all of rows in uneven parts; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.exchange = received, sent, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        received, sent, group = ctx.exchange
        return _all_to_all(gradients[0], sent, received, group), None, None, None


class _Gather(torch.autograd.Function):
    """All-gather of rows in uneven parts, which are padded on the way; the gradient is that of a rank's own part."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: tuple[int, ...], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.part = sum(sizes[:rank]), sizes[rank]
        sent = rows.byte() if rows.dtype == torch.bool else rows  # which gloo does not send
        padded = sent.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = sent
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        whole = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).to(rows.dtype)
        if not whole.is_floating_point():
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        start, size = ctx.part
        return gradients[0].narrow(0, start, size), None, None, None


def _all_to_all(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
