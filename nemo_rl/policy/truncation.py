"""The distribution that top-k and top-p sampling draws from, as the trainer computes it.

An engine that samples with `top_k` or `top_p` reports log-probs of the truncated distribution. The trainer scores the
set of tokens that the engine drew from, if it was recorded ("keep sampling mask", arXiv 2512.02556, section 3.1), and
truncates its own distribution alike if not, so that ratios, KL terms and entropies compare the same kind of
distribution. N positions, W tokens of the largest recorded set, V vocabulary, v the part of it on one rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemo_rl.config.policy import SamplingConfig
from nemo_rl.loss_types import Metric, Normalizer, TokenScores
from nemo_rl.policy.micro_batches import columns_of, loss_mask
from nemo_rl.token_columns import MAX_SET_SIZE, SAMPLING_MASK
from nemo_rl.types import TrainingBatch

# The logit of an excluded token: its probability is exactly 0 in float32, and 0 times it is 0 in entropies.
EXCLUDED = -1e9


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The consecutive tokens whose logits this rank computes; the ranks of `group` compute those of all others."""

    group: dist.ProcessGroup
    first: int  # id of its first token

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of each rank, in order."""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return parts


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens can be sampled: the `top_k` most likely, and of them the smallest set of probability `top_p`."""

    top_p: float = 1.0
    top_k: int | None = None  # None: all

    @property
    def is_whole(self) -> bool:
        """Return whether every token can be sampled."""
        return self.top_p >= 1 and self.top_k is None

    def __call__(
        self, logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard | None = None
    ) -> torch.Tensor:
        """Return `replay` of the policy's own sets."""
        return self.replay(logits, targets, None, shard)[0]

    def replay(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        recorded: torch.Tensor | None,
        shard: VocabularyShard | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits [N, V] in which tokens that cannot be sampled are EXCLUDED; they get no gradient.

        Also returns which recorded sets differ from the policy's own: [N] float32, 1 or 0; None if every token can be
        sampled. A target is always kept, although weights that have changed since, or the engine's rounding, may have
        put it just outside: its log-prob stays finite, and has a gradient.

        Args:
            logits: [N, V] float32, divided by the temperature; [N, v] of a `shard`.
            targets: [N] int64, the sampled tokens.
            recorded: [N, W] ids of the tokens that the engine drew from, padded with ids below 0; the policy's own set
                counts for a row without any. None: for all rows.
            shard: the part of the vocabulary that the logits belong to; None: all of it.
        """
        if self.is_whole:
            return logits, None
        with torch.no_grad():
            whole = logits if shard is None else _gather_columns(logits.detach(), shard)
            kept = kept_tokens(whole, top_p=self.top_p, top_k=self.top_k)
            differs = torch.zeros(len(kept), device=kept.device)
            if recorded is not None:
                own, given = kept, (recorded >= 0).any(dim=1)
                kept = torch.where(given.unsqueeze(1), _to_mask(recorded, own.shape[1]), own)
                differs = (kept != own).any(dim=1).float()
            kept.scatter_(1, targets.unsqueeze(1), True)
            if shard is not None:
                kept = kept[:, shard.first : shard.first + logits.shape[1]]
        return logits.masked_fill(~kept, EXCLUDED), differs


WHOLE = Truncation()


def make_truncation(sampling: SamplingConfig) -> Truncation:
    """Return the truncation of a section's sampling."""
    return Truncation(sampling.top_p, sampling.top_k)


def largest_recorded_set(sampling: SamplingConfig) -> int:
    """Return the tokens of the largest set that an engine may record with a token; 0 if it records none."""
    if not sampling.return_sampling_mask or make_truncation(sampling).is_whole:
        return 0
    return min(sampling.top_k or MAX_SET_SIZE, MAX_SET_SIZE)


def kept_tokens(logits: torch.Tensor, *, top_p: float, top_k: int | None) -> torch.Tensor:
    """Return which tokens of [N, V] logits can be sampled, as bool: top-k first, then top-p of what it leaves.

    A token stays as long as those more likely have less than `top_p` together; the likeliest always stays.

    Example: probabilities .5, .3, .2 keep two tokens for a `top_p` of .6, and all for .9.
    """
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_k is not None and top_k < logits.shape[1]:
        kept = logits >= logits.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        ordered, order = logits.masked_fill(~kept, EXCLUDED).sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        likelier = probs.cumsum(-1) - probs
        kept &= torch.zeros_like(kept).scatter_(1, order, likelier < top_p)
    return kept


def sampling_mask_metrics(scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer) -> dict[str, Metric]:
    """Return how far the sets that a micro-batch was drawn from are the policy's own; nothing without truncation."""
    differs = scores.sampling_mask_differs
    if differs is None:
        return {}
    mask = loss_mask(batch)
    recorded = (columns_of(batch) or {}).get(SAMPLING_MASK)
    missing = torch.ones_like(mask) if recorded is None else (recorded < 0).all(dim=-1).float()
    return {
        "sampling_mask_mismatch": Metric((differs * mask).sum() / normalizer.num_valid_tokens),
        "sampling_mask_missing": Metric((missing * mask).sum() / normalizer.num_valid_tokens),
    }


def _to_mask(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the sets [N, W] as [N, V] bool; ids outside of the vocabulary are in none."""
    beyond = torch.where((ids >= 0) & (ids < vocab_size), ids, vocab_size).long()
    mask = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, beyond, True)[:, :vocab_size]


def _gather_columns(values: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Return the columns [N, V] of all ranks, whose parts [N, v] may differ in width."""
    widths = torch.stack(shard.all_gather(torch.tensor(values.shape[1], device=values.device))).tolist()
    parts = shard.all_gather(F.pad(values, (0, max(widths) - values.shape[1])))
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
