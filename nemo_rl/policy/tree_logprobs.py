"""Log-probs of sequences that share prefixes: each distinct prefix goes through the model, and its head, once.

A position of the tree predicts a different next token for each of its children, so a query is a pair of a position and
a next token. Scores are scattered to every entry of [B, T] with that pair, and autograd sums the branches' gradients.
B rows, T tokens, D positions that predict something, Q queries of them, E needed entries.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.distributed.vision_towers import RowImages
from nemo_rl.errors import PolicyError
from nemo_rl.loss_types import RequiredScores, TokenScores
from nemo_rl.policy.attention import PACKED_ATTENTION, SharedPrefixes, check_shared_prefixes
from nemo_rl.policy.hf_model import small_model
from nemo_rl.policy.logprobs import (
    CPU,
    LOGPROBS_ONLY,
    CausalLogprobs,
    ScoreQuery,
    call_with_recompute,
    concatenate_scores,
    map_scores,
    scatter_scores,
)
from nemo_rl.token_columns import ROUTED_EXPERTS, SAMPLING_MASK

ScoreLogits = Callable[[torch.Tensor, ScoreQuery], TokenScores]


class SharedPrefixLogprobs(CausalLogprobs):
    """A Hugging Face causal model that scores packed sequences and computes each prefix that they share once.

    Scores and gradients are those of `CausalLogprobs`; its arguments are the same.

    Args:
        sharing_key: the configuration key that asks for it.

    Raises:
        ConfigError: for `sharing_key`, if the outputs of a token depend on more than the tokens up to it.
    """

    def __init__(
        self, model: PreTrainedModel, *, sharing_key: str, probe_device: torch.device = CPU, **options: Any
    ) -> None:
        super().__init__(model, probe_device=probe_device, **options)
        probe = small_model(model, probe_device) if model.device.type == "meta" else self.model
        probe.set_attn_implementation(PACKED_ATTENTION)
        check_shared_prefixes(probe, sharing_key)

    def forward(
        self,
        token_ids: torch.Tensor,
        needed: torch.Tensor,
        wanted: RequiredScores = LOGPROBS_ONLY,
        candidate_ids: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
        columns: Mapping[str, torch.Tensor] | None = None,
        images: RowImages | None = None,
        *,
        is_shared: bool = True,
    ) -> TokenScores:
        """Return the same as `CausalLogprobs`; raises PolicyError for images, whose features no tree has."""
        if images is not None:
            raise PolicyError("policy.sequence_packing.share_prefixes: prefixes with images are not shared")
        needed = F.pad(needed[:, 1:], (1, 0))
        lengths = lengths or [token_ids.shape[1]] * len(token_ids)
        tree = SharedPrefixes.of(token_ids, lengths, (columns or {}).get(ROUTED_EXPERTS))
        candidates = None if candidate_ids is None else candidate_ids[needed]
        sets = (columns or {}).get(SAMPLING_MASK)
        sets = None if sets is None else sets[needed]
        queries = TreeQueries.of(tree.row_positions, needed, _beside(candidates, sets))
        score_query = ScoreQuery(
            token_ids[needed][queries.entries],
            None if candidates is None else candidates[queries.entries],
            entropy=wanted.entropy,
            topk=wanted.topk,
            sampling_mask=None if sets is None else sets[queries.entries],
        )
        inputs = tree.model_inputs(token_ids)
        if self.routing is not None:
            self.routing.begin(needed, columns, tree)
        if self.is_chunked:
            hidden = self._hidden_states(inputs)[0].index_select(0, queries.predictors)
            scores = queries.score(self._logits, self._score_logits, hidden, score_query, size=self.chunk_size)
        else:
            logits = self.model(**inputs, use_cache=False).logits[0].index_select(0, queries.predictors).float()
            scores = queries.score(nn.Identity(), self._score_logits, logits, score_query, size=None)
        scores = map_scores(lambda values: values[0].index_select(0, queries.of_entry), [scores])
        return self._with_routes(scatter_scores(scores, needed))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        output_layer = self.model.get_output_embeddings()
        assert isinstance(output_layer, nn.Module)
        return self.head(output_layer, hidden)


@dataclass(frozen=True, slots=True)
class TreeQueries:
    """Distinct queries of a tree's positions: first one of each position, then those of further next tokens.

    Example: position 4 predicts tokens 7 and 8, position 6 predicts 9: `predictors` are 4, 6; the queries are of
    7, 9, 8, and `further` is 0.
    """

    predictors: torch.Tensor  # [D] int64: positions in the row, each once
    entries: torch.Tensor  # [Q] int64: a needed entry that makes each query
    further: torch.Tensor  # [Q - D] int64, ascending: indices into `predictors`, of the queries after the first D
    of_entry: torch.Tensor  # [E] int64: the query of each needed entry

    @classmethod
    def of(cls, row_positions: torch.Tensor, needed: torch.Tensor, candidates: torch.Tensor | None) -> "TreeQueries":
        """Return the queries of the E true entries of `needed` [B, T], of which entry 0 is not needed.

        A position and a next token are one query, unless rows ask for different candidates [E, K] there, or were drawn
        from different sets.
        """
        own = row_positions[needed]  # [E]: a position of the tree is a distinct prefix, so its token and all before it
        before = row_positions.roll(1, dims=1)[needed]
        first, query = _first_of_each(own)
        if candidates is not None:
            differs = (candidates != candidates[first[query]]).any(dim=1).nonzero().squeeze(1)
            query[differs] = torch.arange(len(differs), device=query.device) + len(first)
            first = torch.cat([first, differs])
        at_first, predictor = _first_of_each(before[first])
        is_further = torch.ones_like(first, dtype=torch.bool)
        is_further[at_first] = False
        others = is_further.nonzero().squeeze(1)
        others = others[predictor[others].argsort(stable=True)]
        order = torch.cat([at_first, others])
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(before[first[at_first]], first[order], predictor[others], rank[query])

    def score(
        self,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        score_logits: ScoreLogits,
        hidden: torch.Tensor,
        score_query: ScoreQuery,
        *,
        size: int | None,
    ) -> TokenScores:
        """Return the scores of the queries from the hidden states [D, H] of the predictors.

        The logits of a position are computed once. With a `size`, those of at most that many queries exist at a time,
        and are computed again in the backward pass.
        """
        number = len(self.predictors)
        if size is None or len(self.entries) <= size:
            of_all = score_query.part(slice(0, number)), score_query.part(slice(number, None)), self.further
            return concatenate_scores(_score_chunk(logits_of, score_logits, hidden, *of_all))
        chunks: list[list[TokenScores]] = []
        for at, further in self._chunks(size):
            queries = score_query.part(at), score_query.part(slice(number + further.start, number + further.stop))
            rows = self.further[further] - at.start
            chunks.append(call_with_recompute(_score_chunk, logits_of, score_logits, hidden[at], *queries, rows))
        return concatenate_scores([*(parts[0] for parts in chunks), *(part for parts in chunks for part in parts[1:])])

    def _chunks(self, size: int) -> Iterator[tuple[slice, slice]]:
        """Yield ranges of `predictors` and of `further` that belong together, of at most `size` queries unless
        one position has more."""
        number = len(self.predictors)
        ends = (torch.bincount(self.further, minlength=number) + 1).cumsum(0).cpu().numpy()
        start = done = 0
        while start < number:
            end = max(int(np.searchsorted(ends, done + size, side="right")), start + 1)
            yield slice(start, end), slice(done - start, int(ends[end - 1]) - end)
            start, done = end, int(ends[end - 1])


def _beside(*tables: torch.Tensor | None) -> torch.Tensor | None:
    """Return those of the tables [E, ...] that are given as one, whose rows are equal if all of them are."""
    given = [table for table in tables if table is not None]
    return torch.cat(given, dim=1) if given else None


def _score_chunk(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    score_logits: ScoreLogits,
    hidden: torch.Tensor,
    first: ScoreQuery,
    further: ScoreQuery,
    rows: torch.Tensor,
) -> list[TokenScores]:
    """Return the scores of each row's first query, then of the further queries of `rows`, if any."""
    logits = logits_of(hidden)
    copies = logits.index_select(0, rows)  # the backward pass of the scores overwrites their logits
    scores = [score_logits(logits, first)]
    return [*scores, score_logits(copies, further)] if len(rows) else scores


def _first_of_each(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each distinct value's first occurrence, in the order of values, and each entry's rank."""
    distinct, rank = torch.unique(values, return_inverse=True)
    indices = torch.arange(len(values), device=values.device)
    first = torch.full_like(distinct, len(values)).scatter_reduce_(0, rank, indices, "amin")
    return first, rank
