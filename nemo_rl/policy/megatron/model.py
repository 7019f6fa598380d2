"""A stage of the model on one rank: Megatron's layers, and log-probs from a vocabulary that is split over ranks.

B samples, T tokens, N positions that someone needs, H hidden size.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PreTrainedConfig

from nemo_rl.interfaces import RequiredScores, TokenScores
from nemo_rl.policy.attention import Pack
from nemo_rl.policy.logprobs import answered_in_chunks
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.megatron.attention import CausalAttention
from nemo_rl.policy.megatron.mapping import has_head_norms, has_output_bias, rows_of_a_rank
from nemo_rl.policy.megatron.vocabulary import answered
from nemo_rl.policy.token_scores import LOGPROBS_ALONE, Questions, scattered


class Stage(GPTModel):
    """The layers of this rank; the first stage has the embedding, the last one the output layer.

    Between stages go hidden states [T, B, H]; the last stage gives `TokenScores`, as `CausalLogprobs` does.

    Args:
        settings: Megatron's configuration.
        model: Hugging Face's, of the same model.
        inverse_frequencies: [D / 2] of the rotary embedding.
        temperature: the logits are divided by it.
        chunk_size: positions whose logits exist at once; None: all of a call.
        is_packed: the sequences of a call go through the layers one behind the other in one row.
    """

    def __init__(
        self,
        settings: TransformerConfig,
        model: PreTrainedConfig,
        *,
        inverse_frequencies: torch.Tensor,
        temperature: float,
        chunk_size: int | None,
        is_packed: bool,
    ) -> None:
        super().__init__(
            settings,
            _layer_spec(model),
            vocab_size=rows_of_a_rank(model.vocab_size, settings.tensor_model_parallel_size)
            * settings.tensor_model_parallel_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel.is_first_stage(),
            post_process=parallel.is_last_stage(),
            position_embedding_type="none",  # the rotary embedding is made below
            share_embeddings_and_output_weights=bool(model.tie_word_embeddings),
        )
        self.num_tokens = model.vocab_size
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.is_packed = is_packed
        self.register_buffer("inverse_frequencies", inverse_frequencies.float(), persistent=False)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        token_ids: torch.Tensor,
        needed: torch.Tensor,
        wanted: RequiredScores = LOGPROBS_ALONE,
        candidate_ids: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor | TokenScores:
        """Arguments and scores are those of `CausalLogprobs.forward`; what an earlier stage sent has been set."""
        pack = None
        if self.is_packed:
            pack = Pack.of(lengths or [token_ids.shape[1]] * len(token_ids), token_ids.shape[1], token_ids.device)
        hidden = self._hidden_states(token_ids, pack)
        if not self.post_process:
            return hidden
        needed = F.pad(needed[:, 1:], (1, 0))
        at = needed.flatten().nonzero().squeeze(1)  # [N], into the flattened tokens; at - 1 predicts it
        questions = Questions(
            token_ids.flatten()[at],
            None if candidate_ids is None else candidate_ids.flatten(0, 1).index_select(0, at),
            entropy=wanted.entropy,
            topk=wanted.topk,
        )
        if pack is not None:
            at = pack.places_of(needed)
        flat = hidden.transpose(0, 1).flatten(0, 1)
        hidden = flat.index_select(0, at - 1)
        return scattered(answered_in_chunks(self._of_hidden, hidden, questions, size=self.chunk_size), needed)

    def _hidden_states(self, token_ids: torch.Tensor, pack: Pack | None) -> torch.Tensor:
        """[T, B, H], of a pack [N, 1, H]; whole on each tensor parallel rank."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        if pack is not None:
            token_ids, positions = token_ids[pack.is_inside].unsqueeze(0), pack.positions.squeeze(0)
        return self.decoder(
            hidden_states=self.embedding(input_ids=token_ids, position_ids=None) if self.pre_process else None,
            attention_mask=pack,
            rotary_pos_emb=self._angles(positions),
        )

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """[T] positions to the [T, 1, 1, D] angles that Megatron's layers turn queries and keys by."""
        angles = positions.float()[:, None] * cast(torch.Tensor, self.inverse_frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]

    def _of_hidden(self, hidden: torch.Tensor, questions: Questions) -> TokenScores:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=weight)
        logits = logits.squeeze(1).float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return answered(logits, questions, num_tokens=self.num_tokens)


class _RowParallelLinearWithBias(RowParallelLinear):
    """The last matrix of attention where it alone has a bias, which Megatron gives to all matrices or to none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


def _layer_spec(model: PreTrainedConfig) -> ModuleSpec:
    """Megatron's own modules, with attention by torch's kernels."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=has_head_norms(model))
    attention: Any = copy(cast(Any, spec.submodules).self_attention.submodules)
    attention.core_attention = CausalAttention
    if has_output_bias(model):
        attention.linear_proj = _RowParallelLinearWithBias
    cast(Any, spec.submodules).self_attention.submodules = attention
    return spec
