"""Data between the policy and a loss: the scores of tokens that a loss reads, its divisors, and its metrics.

Shapes: B samples, T tokens, K most likely tokens or candidates.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch


class TopK(NamedTuple):
    """The most likely tokens of each position, most likely first."""

    ids: "torch.Tensor"  # [B, T, K] int64
    logprobs: "torch.Tensor"  # [B, T, K] float32, of the whole vocabulary's log_softmax; 0 if not requested


class RequiredScores(NamedTuple):
    """The values to read of the next-token distributions, beside the log-probs of the tokens themselves."""

    candidates: str | None = None  # batch key of ids [B, T, K] whose log-probs are needed; negative ids are padding
    entropy: bool = False
    topk: int = 0  # the model's own most likely tokens


class TokenScores(NamedTuple):
    """Scores of a micro-batch under the current weights.

    Entry t belongs to token t, hence to the distribution before it; 0 where the token mask is 0 and in entry 0. All are
    of log_softmax(logits / temperature), in float32.
    """

    logprobs: "torch.Tensor"  # [B, T]
    candidates: "torch.Tensor | None" = None  # [B, T, K]; 0 for ids below 0
    entropy: "torch.Tensor | None" = None  # [B, T] of the whole distribution, in nats
    topk: TopK | None = None
    routes: "torch.Tensor | None" = None  # [B, T, L, k] experts of each token (token_columns.py), if they are recorded
    # [B, T]: 1 where the engine drew from another set than top-k and top-p of the policy's own logits leave, else 0;
    # None: nothing is truncated
    sampling_mask_differs: "torch.Tensor | None" = None


@dataclass(frozen=True, slots=True)
class Normalizer:
    """The divisors of one optimizer step: counts over all its samples, whatever micro-batch or rank they are on."""

    num_valid_tokens: float  # sum of token_mask * sample_mask, entry 0 of each sample excluded
    num_valid_trajectories: float
    num_positive_tokens: float = 0.0  # the part of num_valid_tokens in samples with a (shaped) reward above 0


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a micro-batch.

    `sum`: already divided by the normalizer's counts, so micro-batches add up, and optimizer steps are averaged.
    `count`: both add up.
    """

    value: "torch.Tensor"
    reduction: Literal["sum", "count", "min", "max"] = "sum"
