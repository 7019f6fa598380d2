"""Log-probs of given tokens, and other scores that a loss reads, without holding the logits of a whole batch.

B samples, T tokens, N needed positions, H hidden size, V vocabulary, v the part of it on one rank. For a vocabulary of
150k the logits [B, T, V] are by far the largest tensor of training; here the output head is applied to `chunk_size`
positions at a time, and the backward pass recomputes each chunk's logits instead of keeping them. Tensor-parallel ranks
each compute the logits of their part of the vocabulary and exchange a few numbers per position.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from nemo_rl.distributed.float32 import float32_product
from nemo_rl.distributed.vision_towers import ImageEmbedder, RowImages, sees
from nemo_rl.errors import PolicyError
from nemo_rl.loss_types import RequiredScores, TokenScores, TopK
from nemo_rl.policy.attention import PackedSequences, check_packed_attention, use_packed_attention
from nemo_rl.policy.context_parallel import ContextRanks, SlicedSequences, check_context_parallel
from nemo_rl.policy.expert_routing import ExpertRouting
from nemo_rl.policy.hf_model import small_model
from nemo_rl.policy.linear_logprobs import LinearOptions, is_plain_matrix, linear_logprobs
from nemo_rl.policy.log_softmax import logprobs_and_entropy
from nemo_rl.policy.token_layout import PaddedRows, ScoredLayout
from nemo_rl.policy.truncation import WHOLE, Truncation, VocabularyShard
from nemo_rl.token_columns import SAMPLING_MASK

LOGPROBS_ONLY = RequiredScores()
CPU = torch.device("cpu")
KEEPS_FLOAT32_LOGITS = True  # applies to bfloat16 models; scripts/acceptance clears it to measure the cost of rounding
ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoreQuery:
    """A query of N distributions."""

    targets: torch.Tensor  # [N] int64: tokens whose log-probs are needed
    candidate_ids: torch.Tensor | None = None  # [N, K] int64; ids below 0 are padding
    entropy: bool = False
    topk: int = 0
    sampling_mask: torch.Tensor | None = None  # [N, W]: ids that the targets were drawn from; below 0 are padding

    @classmethod
    def at(
        cls,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        wanted: RequiredScores,
        candidates: torch.Tensor | None,
        columns: Mapping[str, torch.Tensor] | None = None,
    ) -> "ScoreQuery":
        """Return the query of N positions in the flattened tokens [B, T], candidates [B, T, K] and columns."""

        def chosen(table: torch.Tensor | None) -> torch.Tensor | None:
            return None if table is None else table.flatten(0, 1).index_select(0, positions)

        targets, sets = token_ids.flatten()[positions], (columns or {}).get(SAMPLING_MASK)
        return cls(targets, chosen(candidates), wanted.entropy, wanted.topk, chosen(sets))

    def part(self, at: slice) -> "ScoreQuery":
        candidates = None if self.candidate_ids is None else self.candidate_ids[at]
        sets = None if self.sampling_mask is None else self.sampling_mask[at]
        return ScoreQuery(self.targets[at], candidates, self.entropy, self.topk, sets)

    def split(self, size: int) -> list["ScoreQuery"]:
        """Split into queries of `size` distributions."""
        return [self.part(slice(start, start + size)) for start in range(0, max(len(self.targets), 1), size)]

    def ids(self) -> list[torch.Tensor]:
        """Return the ids [N, K] of targets and candidates, whose log-probs are needed; padding is 0."""
        candidates = [] if self.candidate_ids is None else [self.candidate_ids.clamp(min=0)]
        return [self.targets.unsqueeze(1), *candidates]

    def scores(self, ids: Sequence[torch.Tensor], logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenScores:
        """Return the scores from the log-probs of `ids` side by side: those of `ids()`, then the top k if needed."""
        parts = list(logprobs.split([part.shape[1] for part in ids], dim=1))
        topk = TopK(ids[-1], parts[-1]) if self.topk else None
        candidates = None if self.candidate_ids is None else parts[1].masked_fill(self.candidate_ids < 0, 0.0)
        return TokenScores(parts[0].squeeze(1), candidates, entropy if self.entropy else None, topk)


@dataclass(frozen=True, slots=True)
class LogitsHead:
    """The head of a model: the output layer, then scaling and soft capping of the logits.

    Supported are `logit_scale` (Cohere), `logits_scaling` (Granite) and `final_logit_softcapping` (Gemma 2 and later).
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "LogitsHead":
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        return cls(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))

    def __call__(self, output_layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits [N, V] of hidden states [N, H]."""
        logits = project_to_logits(output_layer, hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.float()


def project_to_logits(output_layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits [N, V] of an output layer; in float32 also for bfloat16, as every engine has them.

    Products of bfloat16 are summed in float32 either way; a matrix product that returns bfloat16 then rounds the sums,
    logits near 20 by up to 0.06. A layer that is split over ranks or has a bias is called as it is.
    """
    if not KEEPS_FLOAT32_LOGITS or hidden.dtype != torch.bfloat16:
        return output_layer(hidden)
    if not isinstance(output_layer, nn.Linear) or output_layer.bias is not None:
        return output_layer(hidden)
    weight = output_layer.weight
    if isinstance(weight, DTensor) or weight.dtype != torch.bfloat16:
        return output_layer(hidden)
    return _Float32Product.apply(hidden, weight)  # type: ignore[no-any-return]


class _Float32Product(torch.autograd.Function):
    """hidden @ weight.T of bfloat16 in float32, for which torch 2.13 has no derivative; gradients are bfloat16."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return float32_product(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradients[0].to(weight.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return gradient @ weight if needs_hidden else None, gradient.T @ hidden if needs_weight else None


class CausalLogprobs(nn.Module):
    """A Hugging Face causal model that scores the tokens of right-padded sequences.

    A position sees only what is to its left, and padding is to the right, so no attention mask is needed and the
    positions are 0, 1, 2, ...: both are the model's defaults, and attention keeps its fastest kernel. When packed, the
    sequences of a call are concatenated into one row without padding; the caller sees no difference.

    Args:
        model: used in evaluation mode (no dropout). Without values yet (on the meta device) a small model of its kind
            takes its place in the checks of head and packing.
        temperature: the logits are divided by it.
        chunk_size: positions whose logits exist at once; None: all of them.
        packing_key: the configuration key that asks for packed sequences; the model's attention is replaced for good.
            None: sequences are padded.
        context: the configuration key that asks for slices of packed sequences on several ranks, and its value; the
            ranks are given as the attribute `context`. Sequences are then packed in any case.
        probe_device: device of the small model for the checks.

    Raises:
        ConfigError: for `packing_key` or `context`, if it would change the model's outputs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        chunk_size: int | None,
        packing_key: str | None = None,
        context: tuple[str, int] | None = None,
        probe_device: torch.device = CPU,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.head = LogitsHead.of(model)
        self.truncation = WHOLE  # the scored distribution's
        self.vocabulary: VocabularyShard | None = None  # this rank's part of a split output layer
        self.casts_inputs = True  # layers of a bfloat16 model are given bfloat16 alone
        self.routing: ExpertRouting | None = None  # for a mixture of experts that is trained
        self.context: ContextRanks | None = None  # ranks that compute slices of each row
        self.images = ImageEmbedder(model) if sees(model.config) else None
        probe = small_model(model, probe_device) if model.device.type == "meta" else self.model
        self.is_chunked = self._supports_chunked_logits(probe)
        if not self.is_chunked:
            logger.warning(
                "%s has a custom logits computation: logits of whole micro-batches are kept in memory, and "
                "policy.logprob_chunk_size has no effect",
                type(model).__name__,
            )
        self.is_packed = packing_key is not None or context is not None
        if context is not None:
            check_context_parallel(probe, *context)
        elif packing_key is not None:
            check_packed_attention(probe, packing_key)
        if self.is_packed:
            use_packed_attention(self.model)

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
        """Return log_softmax(logits / temperature) of `token_ids` where `needed`, else 0, and other `wanted` scores.

        Args:
            token_ids: [B, T] int64, right-padded.
            needed: [B, T] bool; entry 0 is ignored, since nothing precedes it.
            wanted: scores besides log-probs.
            candidate_ids: [B, T, K] int64, with `wanted.candidates`.
            lengths: [B] tokens of each row before its padding, which is never needed; read when packed.
            columns: [B, T, ...] by name: what the engine decided per token (token_columns.py); None: nothing.
            images: those of the rows; None: there are none.
            is_shared: by the ranks of `context`; false: the rows are this rank's own.

        Returns:
            Scores in float32, computed in float32 from the logits on: a named tuple, in which FSDP2 finds the tensors
            that have a gradient.
        """
        needed = F.pad(needed[:, 1:], (1, 0))
        at = needed.flatten().nonzero().squeeze(1)  # [N], into the flattened tokens
        lengths = lengths or [token_ids.shape[1]] * len(token_ids)
        ranks = self.context if self.context is None or is_shared else self.context.alone
        layout = self._lay_out(token_ids, lengths, ranks)
        share, inputs = layout.share(needed), layout.model_inputs(token_ids)
        inputs |= self._image_inputs(token_ids, lengths, images, layout)
        score_query = ScoreQuery.at(at[share.part], token_ids, wanted, candidate_ids, columns)
        if self.routing is not None:
            self.routing.begin(needed, columns, layout)
        if self.is_chunked:
            hidden = self._hidden_states(inputs).flatten(0, 1).index_select(0, share.predictors)
            scores = self._score_in_chunks(hidden, score_query)
        else:
            logits = self.model(**inputs, use_cache=False).logits
            scores = self._score_logits(logits.flatten(0, 1).index_select(0, share.predictors).float(), score_query)
        if ranks is not None:
            scores = map_scores(lambda values: ranks.gather(values[0], share.sizes), [scores])
        return self._with_routes(scatter_scores(scores, needed))

    def _lay_out(self, token_ids: torch.Tensor, lengths: Sequence[int], ranks: ContextRanks | None) -> ScoredLayout:
        width = token_ids.shape[1]
        if not self.is_packed:
            return PaddedRows(width)
        pack = PackedSequences.of(lengths, width, token_ids.device)
        return pack if ranks is None else SlicedSequences.of(pack, ranks)

    def _image_inputs(
        self, token_ids: torch.Tensor, lengths: Sequence[int], images: RowImages | None, layout: ScoredLayout
    ) -> dict[str, Any]:
        """Return the inputs of a model that sees, in place of its tokens' ids; nothing for one that does not."""
        if self.images is None:
            if images is not None:
                raise PolicyError(f"images for {type(self.model).__name__}, which reads text")
            return {}
        if images is None and not self.images.always_runs:
            return {}  # also a model with positions of several axes then counts tokens
        rows = None if images is None else replace(images, rows=layout.lay_out(images.rows))
        inputs: dict[str, Any] = {
            "input_ids": None,
            **self.images.embed(layout.lay_out(token_ids), rows),
        }
        positions = self.images.positions(token_ids, lengths, images)
        if positions is None:
            return inputs
        if isinstance(layout, PackedSequences):  # text positions first, by which transformers would know the sequences
            laid_out = torch.stack([layout.lay_out(axis) for axis in positions])
            positions = torch.cat([layout.positions.unsqueeze(0), laid_out])
        return {**inputs, "position_ids": positions}

    def _with_routes(self, scores: TokenScores) -> TokenScores:
        return scores if self.routing is None else scores._replace(routes=self.routing.take_live())

    def _hidden_states(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.model.base_model(**inputs, use_cache=False).last_hidden_state

    def _score_in_chunks(self, hidden: torch.Tensor, score_query: ScoreQuery) -> TokenScores:
        """Return the scores of [N, H] hidden states; by `linear_logprobs` if nothing else reads the logits."""
        output_layer = cast(nn.Module, self.model.get_output_embeddings())
        reads_logits = score_query.topk > 0 or not self.truncation.is_whole or self.head.softcap is not None
        is_rounded = hidden.dtype == torch.bfloat16 and not KEEPS_FLOAT32_LOGITS
        if reads_logits or is_rounded or not is_plain_matrix(output_layer, hidden):
            return score_in_chunks(self._score_hidden, hidden, score_query, size=self.chunk_size)
        ids = score_query.ids()
        options = LinearOptions(self.head.scale / self.temperature, score_query.entropy, self.chunk_size)
        weight = cast(torch.Tensor, output_layer.weight)
        return score_query.scores(ids, *linear_logprobs(hidden, weight, torch.cat(ids, dim=1), options))

    def _score_hidden(self, hidden: torch.Tensor, score_query: ScoreQuery) -> TokenScores:
        return self._score_logits(self.head(cast(nn.Module, self.model.get_output_embeddings()), hidden), score_query)

    def _score_logits(self, logits: torch.Tensor, score_query: ScoreQuery) -> TokenScores:
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return score_truncated(logits, score_query, self.truncation, self.vocabulary)

    @torch.no_grad()
    def _supports_chunked_logits(self, model: PreTrainedModel) -> bool:
        """Return whether base model, output layer and `LogitsHead` together compute the model's own logits."""
        output_layer = model.get_output_embeddings()
        if output_layer is None or model.base_model is model:
            return False
        probe = torch.arange(4, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
        logits = model(input_ids=probe, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
        return torch.allclose(self.head(output_layer, hidden), logits, rtol=1e-4, atol=1e-4)


def score_in_chunks(
    score_hidden: Callable[[torch.Tensor, ScoreQuery], TokenScores],
    hidden: torch.Tensor,
    score_query: ScoreQuery,
    *,
    size: int | None,
) -> TokenScores:
    """Return `score_hidden` of [N, H] hidden states, `size` of them at a time (None: all), without keeping logits."""
    size = size or max(len(hidden), 1)
    if len(hidden) <= size:
        return score_hidden(hidden, score_query)
    parts = zip(hidden.split(size), score_query.split(size), strict=True)
    return concatenate_scores([call_with_recompute(score_hidden, h, q) for h, q in parts])


def call_with_recompute(function: Callable[..., ResultT], *args: Any) -> ResultT:
    """Return the function's result; its intermediate tensors are recomputed in the backward pass."""
    return cast(ResultT, checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False))


def score_logits(logits: torch.Tensor, score_query: ScoreQuery, shard: VocabularyShard | None = None) -> TokenScores:
    """Return the scores of [N, V] float32 logits, already divided by the temperature; entries are [N] and [N, K].

    The logits are consumed: their gradient overwrites them. With a `shard` they are [N, v], and every rank gets the
    scores of the whole vocabulary.
    """
    ids = score_query.ids()
    if score_query.topk:
        ids.append(_topk_ids(logits.detach(), score_query.topk, shard))
    scores = logprobs_and_entropy(logits, torch.cat(ids, dim=1), entropy=score_query.entropy, shard=shard)
    return score_query.scores(ids, *scores)


def score_truncated(
    logits: torch.Tensor, score_query: ScoreQuery, truncation: Truncation, shard: VocabularyShard | None = None
) -> TokenScores:
    """Return `score_logits` of the distribution that the targets were drawn from."""
    logits, differs = truncation.replay(logits, score_query.targets, score_query.sampling_mask, shard)
    return score_logits(logits, score_query, shard)._replace(sampling_mask_differs=differs)


def map_scores(function: Callable[[list[torch.Tensor]], torch.Tensor], parts: Sequence[TokenScores]) -> TokenScores:
    """Return the scores whose tensors are `function` of the corresponding tensors of `parts`, None for missing ones."""

    def call(values: tuple[Any, ...]) -> Any:
        if isinstance(values[0], TopK):
            return TopK(*map(call, zip(*values, strict=True)))
        return None if values[0] is None else function(list(values))

    return TokenScores(*map(call, zip(*parts, strict=True)))


def concatenate_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """Return the scores of consecutive chunks as one."""
    return map_scores(torch.cat, parts)


def scatter_scores(scores: TokenScores, needed: torch.Tensor) -> TokenScores:
    """Scatter [N] and [N, K] scores to the N true positions of `needed`: [B, T] and [B, T, K], 0 elsewhere."""
    return map_scores(lambda values: _scatter(values[0], needed), [scores])


def _topk_ids(logits: torch.Tensor, k: int, shard: VocabularyShard | None) -> torch.Tensor:
    """Return the ids of the k largest logits [N, k]; over all ranks those among each rank's k largest."""
    if shard is None:
        return logits.topk(k, dim=-1).indices
    own, ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    missing = k - own.shape[1]  # ranks may have parts of different sizes
    own, ids = F.pad(own, (0, missing), value=-torch.inf), F.pad(ids + shard.first, (0, missing))
    among_all = torch.cat(shard.all_gather(own), dim=1).topk(k, dim=-1).indices
    return torch.cat(shard.all_gather(ids), dim=1).gather(1, among_all)


def _scatter(values: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    width = values.shape[1:]
    zeros = torch.zeros((*needed.shape, *width), dtype=values.dtype, device=values.device)
    mask = needed if not width else needed.unsqueeze(-1).expand(*needed.shape, *width)
    return zeros.masked_scatter(mask, values)  # not a view, which FSDP2 warns of
