"""Context parallelism: the ranks of a group each compute a slice of a micro-batch's packed tokens.

The samples of a micro-batch are one row of tokens, padded to N, a multiple of the C ranks; rank c has the n = N / C
tokens from c n on. Embedding, norms, MLPs, experts, output layer and scores are computed per token, on slices. Around
attention an all-to-all gives each rank the whole row of its share of the heads, and a second one its slice of all heads
(Ulysses, arXiv 2309.14509): attention is that of packed sequences as it is. Positions, labels and every other column
are cut from the whole row, so a slice's last token has its label from the next slice. At the end scores, a few numbers
per token, are gathered: losses and metrics see whole samples, each token once, and know nothing of slices.
H heads of queries, K of keys and values, D width of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from nemo_rl.distributed.float32 import attention_inputs
from nemo_rl.errors import ConfigError
from nemo_rl.policy.attention import SINK_MODEL_TYPES, PackedSequences, packed_attention_forward, packing_problem
from nemo_rl.policy.exchanges import exchange_rows, gather_rows
from nemo_rl.policy.ranks import RankLayout, context_group
from nemo_rl.policy.token_layout import ScoredShare

SLICED_ATTENTION = "nemo_rl_over_context_ranks"
LONE_TOKENS = "nemo_rl_lone_tokens"


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share a row, and the position of this one among them."""

    group: dist.ProcessGroup | None  # None: a single rank
    rank: int
    size: int
    parts: int = 1  # equal ones of a rank's slice, over tensor-parallel ranks (`sequence_parallel`)

    @property
    def alone(self) -> "ContextRanks":
        """Return this rank with rows of its own."""
        return ContextRanks(None, 0, 1, self.parts)

    def slice_size(self, num_tokens: int) -> int:
        """Return n, the tokens of each rank's slice of a row, padding included."""
        return -(-num_tokens // (self.size * self.parts)) * self.parts

    def gather(self, rows: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return the rows of all ranks, `sizes` of each (None: as many as this one has); see `gather_rows`."""
        if self.group is None:
            return rows
        return gather_rows(rows, sizes or (len(rows),) * self.size, self.rank, self.group)


def context_ranks(layout: RankLayout, *, parts: int = 1) -> ContextRanks | None:
    """Return the ranks that share rows with this one; None if rows are not cut. All ranks call it together."""
    size = layout.context_parallel_size
    if size == parts == 1:
        return None
    return ContextRanks(context_group(layout) if size > 1 else None, layout.context_parallel_rank, size, parts)


@dataclass(frozen=True, slots=True)
class SlicedSequences:
    """One rank's slice of packed sequences."""

    pack: PackedSequences  # the samples' tokens
    row: PackedSequences  # N tokens, as attention sees them: the padding is one more sequence
    ranks: ContextRanks

    @classmethod
    def of(cls, pack: PackedSequences, ranks: ContextRanks) -> "SlicedSequences":
        padding = ranks.slice_size(sum(pack.lengths)) * ranks.size - sum(pack.lengths)
        if padding == 0:
            return cls(pack, pack, ranks)
        positions = torch.arange(padding, device=pack.positions.device).unsqueeze(0)
        row = PackedSequences(
            (*pack.lengths, padding),
            torch.cat([pack.bounds, pack.bounds[-1:] + padding]),
            pack.is_not_padding,
            torch.cat([pack.positions, positions], dim=1),
        )
        return cls(pack, row, ranks)

    @property
    def size(self) -> int:
        """Return n, the tokens of each rank."""
        return self.row.positions.shape[1] // self.ranks.size

    @property
    def start(self) -> int:
        """Return the position of this rank's first token in the row."""
        return self.ranks.rank * self.size

    def model_inputs(self, token_ids: torch.Tensor) -> dict[str, Any]:
        return {
            "input_ids": self.lay_out(token_ids),
            "position_ids": self.row.positions.narrow(1, self.start, self.size),
            "pack": self,  # passed through to the attention
        }

    def lay_out(self, column: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a column [B, T, ...], 0 in padding: [1, n, ...]."""
        part = self.pack.lay_out(column)[:, self.start : self.start + self.size]
        return F.pad(part, (*(0, 0) * (column.ndim - 2), 0, self.size - part.shape[1]))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values [n, ...] of all ranks as a column [B, T, ...], 0 in padding; all ranks call it."""
        return self.pack.spread(self.ranks.gather(values)[: sum(self.pack.lengths)])

    def share(self, needed: torch.Tensor) -> ScoredShare:
        predictors = self.pack.packed_positions(needed) - 1  # ascending
        starts = torch.arange(self.ranks.size + 1, device=predictors.device) * self.size
        bounds = torch.searchsorted(predictors, starts).tolist()
        part = slice(bounds[self.ranks.rank], bounds[self.ranks.rank + 1])
        sizes = tuple(end - start for start, end in pairwise(bounds))
        return ScoredShare(predictors[part] - self.start, part, sizes)


def sliced_tokens(num_tokens: int, ranks: ContextRanks, device: torch.device) -> torch.Tensor:
    """Return which of this rank's tokens of a row of samples are no padding: [n] bool."""
    size = ranks.slice_size(num_tokens)
    return torch.arange(ranks.rank * size, (ranks.rank + 1) * size, device=device) < num_tokens


@torch.compiler.disable  # lengths differ in every pack, and each would be compiled again
def sliced_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack: SlicedSequences,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return packed attention over the slices of all ranks, as transformers calls it.

    From [1, heads, n, width] to [1, n, heads, width].
    """

    attend_packed: Any = packed_attention_forward  # whose type the compiler's decorator hides

    def attend(*whole: torch.Tensor) -> torch.Tensor:
        groups = whole[0].shape[1] // whole[1].shape[1]  # fewer than the layer's, if its keys are sent to several ranks
        local: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True))
        return attend_packed(local, *whole, attention_mask, pack=pack.row, **options)[0]

    return attend_over_slices(attend, *attention_inputs(query, key, value), pack.ranks), None


def attend_over_slices(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranks: ContextRanks,
) -> torch.Tensor:
    """Return a slice [1, n, heads, width] of the attention of whole rows, from slices [1, heads, n, width].

    `attend` computes [1, N, heads, width] from whole rows [1, heads, N, width] of some of the heads. Keys and values
    whose heads the ranks do not divide are sent to several, and autograd sums their gradients.
    """
    if ranks.group is None:
        return attend(query, key, value)
    if (copies := ranks.size // math.gcd(ranks.size, key.shape[1])) > 1:
        key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
    whole = _slices_to_heads((query, key, value), ranks, ranks.group)
    return _heads_to_slice(attend(*whole), ranks, ranks.group)


def _slices_to_heads(
    states: Sequence[torch.Tensor], ranks: ContextRanks, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return [1, H / C, N, D] of whole rows from [1, H, n, D] of slices, for several states in one exchange."""
    size, length = ranks.size, states[0].shape[2]
    blocks = [one[0].reshape(size, -1) for one in states]  # heads are the first axis: a block per rank that gets them
    sent = torch.cat(blocks, dim=1)
    parts = exchange_rows(sent, (1,) * size, (1,) * size, group).split([b.shape[1] for b in blocks], dim=1)
    return [
        part.view(size, -1, length, one.shape[3]).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        for part, one in zip(parts, states, strict=True)
    ]


def _heads_to_slice(result: torch.Tensor, ranks: ContextRanks, group: dist.ProcessGroup) -> torch.Tensor:
    """Return [1, n, H, D] of a slice from [1, N, H / C, D] of the whole row."""
    size, (heads, width) = ranks.size, result.shape[2:]
    received = exchange_rows(result[0].reshape(size, -1), (1,) * size, (1,) * size, group)
    return received.view(size, -1, heads, width).transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _lone_tokens_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of tokens that each see themselves alone."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None


def check_context_parallel(model: PreTrainedModel, key: str, size: int) -> None:
    """Raise ConfigError for `key`, a number of ranks or True, if slices of packed sequences would have other outputs.

    Attention must be the only way from one token to another: with that of lone tokens, a slice has the same outputs as
    in its row. Changes the model's attention.
    """
    kind, allowed = model.config.model_type, "false" if size is True else "1"
    if kind in SINK_MODEL_TYPES and size is not True:
        raise ConfigError(key, size, f"the attention sinks of models of type {kind!r} are not divided; allowed: 1")
    if (problem := packing_problem(model)) is not None:
        raise ConfigError(key, size, f"{problem}, and ranks have slices of a pack; allowed: {allowed}")
    model.set_attn_implementation(LONE_TOKENS)
    tokens = torch.arange(6, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]], device=model.device)

    def logits(at: slice) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens[:, at], "position_ids": positions[:, at]}
        return model(**inputs, use_cache=False).logits[0].float()

    with torch.no_grad():
        sliced = torch.cat([logits(slice(0, 3)), logits(slice(3, 6))])
        whole = logits(slice(None))
    if not torch.allclose(sliced, whole, rtol=1e-4, atol=1e-4):
        raise ConfigError(key, size, f"models of type {kind!r} pass tokens on beside attention; allowed: {allowed}")


AttentionInterface.register(SLICED_ATTENTION, sliced_attention_forward)
AttentionInterface.register(LONE_TOKENS, _lone_tokens_forward)
