"""A stage of the model on one rank: Megatron's layers, and log-probs from a vocabulary that is split over ranks.

B samples, T tokens, N needed positions, H hidden size.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn
from transformers import PreTrainedConfig

from nemo_rl.config.policy import PolicyConfig, TeacherConfig
from nemo_rl.loss_types import RequiredScores, TokenScores
from nemo_rl.policy.attention import PackedSequences, has_varlen_kernel, varlen_attention
from nemo_rl.policy.context_parallel import ContextRanks, SlicedSequences, attend_over_slices
from nemo_rl.policy.logprobs import (
    LOGPROBS_ONLY,
    ScoreQuery,
    map_scores,
    scatter_scores,
    score_in_chunks,
    score_truncated,
)
from nemo_rl.policy.megatron import mapping, parallel
from nemo_rl.policy.megatron.backend import MegatronConfig
from nemo_rl.policy.megatron.experts import ExpertLayer, expert_options
from nemo_rl.policy.megatron.kernels import Kernels, NormOfParts, layer_spec
from nemo_rl.policy.megatron.mapping import vocab_rows_per_rank
from nemo_rl.policy.megatron.mixtures import read_mixture
from nemo_rl.policy.megatron.routing import StageRouting
from nemo_rl.policy.token_layout import PaddedRows
from nemo_rl.policy.truncation import WHOLE, VocabularyShard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    model: PreTrainedConfig, config: PolicyConfig | TeacherConfig, device: torch.device, kernels: Kernels
) -> TransformerConfig:
    """Return the configuration of Megatron's layers and schedules.

    Weights are not initialised, since all are loaded. Losses are sums over micro-batches and ranks (a "per-token loss"
    that nothing divides), so gradients are summed, not averaged.
    """
    section = config.section_of(MegatronConfig)
    dtype = DTYPES[config.precision]
    is_cpu = device.type == "cpu"
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=mapping.head_dim(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=mapping.has_head_norms(model),
        add_bias_linear=False,
        add_qkv_bias=mapping.has_input_bias(model),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=section.tensor_model_parallel_size,
        sequence_parallel=splits_residual(section, model),
        pipeline_model_parallel_size=section.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=section.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=section.num_layers_in_last_pipeline_stage,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=DTYPES[section.pipeline_dtype or config.precision],
        variable_seq_lengths=True,  # micro-batches are trimmed to their longest sample
        **expert_options(read_mixture(model), section),
        batch_p2p_comm=not is_cpu,
        deallocate_pipeline_outputs=True,
        cuda_graph_scope=[],  # none; the default warns
        use_cpu_initialization=is_cpu,
        perform_initialization=False,
        **cast(dict[str, Any], kernels.fusions),
        calculate_per_token_loss=True,
        finalize_model_grads_func=_sum_gradients,
    )


def splits_residual(section: MegatronConfig, model: PreTrainedConfig) -> bool:
    """Return whether tensor-parallel ranks each hold a part of the tokens between the matrices of a layer."""
    return section.splits_residual and read_mixture(model) is None


def _sum_gradients(model: list[Any], num_tokens: Any = None, **arguments: Any) -> None:
    """Sum the gradients of all ranks without a division: the loss is already normalized."""
    finalize_model_grads(model, None, **arguments)


def _layer_specs(settings: TransformerConfig, model: PreTrainedConfig, kernels: Kernels) -> TransformerBlockSubmodules:
    """Return the specifications of this stage's layers, with experts if the model has them, and of the last norm."""
    is_split = settings.sequence_parallel
    dense = layer_spec(model, kernels, core_attention=CausalAttention, splits_residual=is_split)
    mixture, sparse = read_mixture(model), dense
    if mixture is not None:
        sparse = layer_spec(model, kernels, core_attention=CausalAttention, experts=ExpertLayer)
    has_experts = mixture.has_experts if mixture is not None else (False,) * model.num_hidden_layers
    first = get_transformer_layer_offset(settings)
    own = has_experts[first : first + get_num_layers_to_build(settings)]
    specs = [sparse if layer_has_experts else dense for layer_has_experts in own]
    norm: Any = NormOfParts if is_split and not kernels.transformer_engine else LayerNormImpl
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


class CausalAttention(nn.Module):
    """Causal attention with grouped queries over sequences that are right-padded or packed.

    Made and called by Megatron's attention layer, hence the arguments; the softmax scale is 1 / sqrt(head width).
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: PackedSequences | SlicedSequences | None,
        **_: Any,
    ) -> torch.Tensor:
        """Return [T, B, heads * D] from queries [T, B, heads, D] and keys and values [T, B, groups, D].

        The argument `attention_mask` is a pack, a slice of one, or None. Without a pack a causal mask suffices, since
        padding is on the right.
        """
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [B, heads, T, D]
        if attention_mask is None:
            return _causal(q, k, v).permute(2, 0, 1, 3).flatten(2)
        if isinstance(attention_mask, SlicedSequences):
            attend = partial(_within_sequences, attention_mask.row)
            result = attend_over_slices(attend, q, k, v, attention_mask.ranks)
        else:
            result = _within_sequences(attention_mask, q, k, v)
        return result.transpose(0, 1).flatten(2)


def _within_sequences(
    pack: PackedSequences, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return causal attention within each sequence: from [1, heads, N, D] to [1, N, heads, D]."""
    if has_varlen_kernel(query, value):
        return varlen_attention(query, key, value, pack)
    parts = zip(*(states.split(pack.lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([_causal(*part) for part in parts], dim=2).transpose(1, 2)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)


class Stage(GPTModel):
    """The layers of this rank; the first stage has the embedding, the last one the output layer.

    Stages exchange hidden states [T, B, H]; the last stage returns `TokenScores`, as `CausalLogprobs` does.

    Args:
        settings: Megatron's configuration.
        model: Hugging Face's, of the same model.
        inverse_frequencies: [D / 2] of the rotary embedding.
        temperature: the logits are divided by it.
        chunk_size: positions whose logits exist at once; None: all of them.
        is_packed: the sequences of a call are concatenated into one row.
        context: the ranks that each compute a slice of that row, which is then made in any case; None: one has all.
        kernels: of the layers.
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
        context: ContextRanks | None,
        kernels: Kernels,
    ) -> None:
        super().__init__(
            settings,
            cast("Any", _layer_specs(settings, model, kernels)),
            vocab_size=vocab_rows_per_rank(model.vocab_size, settings.tensor_model_parallel_size)
            * settings.tensor_model_parallel_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel.is_first_stage(),
            post_process=parallel.is_last_stage(),
            position_embedding_type="none",  # the rotary embedding is made below
            share_embeddings_and_output_weights=bool(model.tie_word_embeddings),
        )
        self.config = copy(settings)  # which the schedules read; the layers keep their own
        self.config.num_moe_experts = None  # else they scale losses of the layers by the device of the scores
        self.routing: StageRouting | None = None  # for a mixture of experts that is trained
        if settings.sequence_parallel:
            self._split_outside_layers(settings)
        self.num_tokens = model.vocab_size
        self.temperature = temperature
        self.truncation = WHOLE  # the scored distribution's
        self.chunk_size = chunk_size
        self.is_packed = is_packed or context is not None
        self.context = context
        self.register_buffer("inverse_frequencies", inverse_frequencies.float(), persistent=False)

    def _split_outside_layers(self, settings: TransformerConfig) -> None:
        """Let tensor-parallel ranks have parts of the tokens up to the scores, which are of whole slices."""
        outside = copy(settings)
        outside.sequence_parallel = False  # else both fork CUDA's random numbers, which nothing draws here
        self.decoder.config = outside
        if self.pre_process:
            self.embedding.config = outside  # it was made to scatter the sums of its ranks
        if self.post_process:
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        token_ids: torch.Tensor,
        needed: torch.Tensor,
        wanted: RequiredScores = LOGPROBS_ONLY,
        candidate_ids: torch.Tensor | None = None,
        lengths: Sequence[int] | None = None,
        columns: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor | TokenScores:
        """Return hidden states or scores; arguments and scores are those of `CausalLogprobs.forward`.

        Megatron's schedule has already set the input that an earlier stage sent.
        """
        pack: PackedSequences | SlicedSequences | None = None
        width = token_ids.shape[1]
        if self.is_packed:
            pack = PackedSequences.of(lengths or [width] * len(token_ids), width, token_ids.device)
            pack = pack if self.context is None else SlicedSequences.of(pack, self.context)
        needed = F.pad(needed[:, 1:], (1, 0))
        if self.routing is not None:
            self.routing.begin(needed, columns, pack)
        hidden = self._hidden_states(token_ids, pack)
        if not self.post_process:
            return hidden
        at = needed.flatten().nonzero().squeeze(1)  # [N], into the flattened tokens
        share = (PaddedRows(width) if pack is None else pack).share(needed)
        score_query = ScoreQuery.at(at[share.part], token_ids, wanted, candidate_ids, columns)
        if self.config.sequence_parallel:  # each rank's gradient is already that of the whole vocabulary
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        hidden = hidden.transpose(0, 1).flatten(0, 1).index_select(0, share.predictors)
        scores = score_in_chunks(self._score_hidden, hidden, score_query, size=self.chunk_size)
        if (ranks := self.context) is not None:
            scores = map_scores(lambda values: ranks.gather(values[0], share.sizes), [scores])
        return scatter_scores(scores, needed)

    def _hidden_states(self, token_ids: torch.Tensor, pack: PackedSequences | SlicedSequences | None) -> torch.Tensor:
        """Return the last hidden states, whole on each tensor-parallel rank: [T, B, H], of a pack [N, 1, H]."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        if pack is not None:
            inputs = pack.model_inputs(token_ids)
            token_ids, positions = inputs["input_ids"], inputs["position_ids"].squeeze(0)
        return self.decoder(
            hidden_states=self.embedding(input_ids=token_ids, position_ids=None) if self.pre_process else None,
            attention_mask=pack,
            rotary_pos_emb=self._angles(positions),
        )

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rotary angles [T, 1, 1, D] of [T] positions."""
        angles = positions.float()[:, None] * cast(torch.Tensor, self.inverse_frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]

    def _score_hidden(self, hidden: torch.Tensor, score_query: ScoreQuery) -> TokenScores:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.unsqueeze(1), weight=weight)
        logits = logits.squeeze(1).float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if dist.get_world_size(parallel.tensor_group()) == 1:
            return score_truncated(logits, score_query, self.truncation)
        first = parallel.tensor_rank() * logits.shape[1]
        if first + logits.shape[1] > self.num_tokens:  # the last rank has padding
            logits = logits[:, : self.num_tokens - first]
        shard = VocabularyShard(parallel.tensor_group(), first)
        return score_truncated(logits, score_query, self.truncation, shard)
