"""The order in which a model computes the tokens of right-padded rows [B, T], and what each rank scores of them.

Rows are computed padded (here), packed (attention.py), packed in slices of several ranks (context_parallel.py) or as a
tree (attention.py). N tokens of a rank, M needed entries of all rows, m of them scored by this rank.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class TokenLayout(Protocol):
    """The order in which a model computes the tokens of rows [B, T]."""

    def lay_out(self, column: torch.Tensor) -> torch.Tensor:
        """Return a column [B, T, ...] in that order: its first two axes have N entries."""
        ...

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [N, ...] as a column [B, T, ...], with any value in padding."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredShare:
    """The needed entries that a rank scores."""

    predictors: torch.Tensor  # [m] int64: positions in the rank's N tokens of the distributions before the entries
    part: slice = field(default_factory=lambda: slice(None))  # this rank's part of the M entries
    sizes: tuple[int, ...] = ()  # entries of each rank of a context; empty: this rank scores all


class ScoredLayout(TokenLayout, Protocol):
    """A layout in which a token is predicted by the one before it, if a rank computes that one."""

    def model_inputs(self, token_ids: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a model for [B, T] tokens."""
        ...

    def share(self, needed: torch.Tensor) -> ScoredShare:
        """Return this rank's share of the true entries of [B, T], none of which is padding or the first of a row."""
        ...


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows [B, T] that are computed with their padding."""

    width: int  # T

    def model_inputs(self, token_ids: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": token_ids}

    def lay_out(self, column: torch.Tensor) -> torch.Tensor:
        return column

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        return values.unflatten(0, (-1, self.width))

    def share(self, needed: torch.Tensor) -> ScoredShare:
        return ScoredShare(needed.flatten().nonzero().squeeze(1) - 1)
