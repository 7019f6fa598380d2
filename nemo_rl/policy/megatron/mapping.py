"""The weights of a model under Hugging Face's and Megatron's names, whole and sharded.

A `Weight` is one tensor of Megatron's, or one per expert of a layer, and the Hugging Face tensors that it is made of;
tensor-parallel ranks, or the ranks that share a layer's experts, hold its shards. The mapping permutes entries (and
pads the vocabulary with zeros), so it is exact both ways and also maps the state of an optimizer.

linear_qkv   a group's queries, key and value, group after group: split along groups
linear_fc1   gate and up of the MLP, each split by rows, a rank's two shards concatenated
experts      a matrix of all experts of a layer, stacked in transformers: split along experts, then as an MLP
others       split by rows (vocabulary), by columns (the second matrix of attention and MLP), or whole on each rank
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedConfig

from nemo_rl.policy.megatron.mixtures import Mixture, read_mixture

Index = tuple[slice, ...]  # part of a tensor, by its first dimensions
Shape = Sequence[int]


@dataclass(frozen=True)
class Weight(ABC):
    """One tensor of Megatron's, and the Hugging Face tensors that it is made of."""

    name: str  # Megatron's, with the layer's number among all layers
    sources: tuple[str, ...]  # Hugging Face's names

    is_split: bool = True  # ranks hold shards
    is_of_experts: bool = False  # these ranks are those that share a layer's experts, not the tensor-parallel ones

    def tensor_names(self, size: int) -> tuple[str, ...]:
        """Return Megatron's names of the tensors that a shard of one of `size` ranks is stacked from."""
        return (self.name,)

    @property
    def read_from(self) -> tuple[str, ...]:
        """Return the source of each part of a shard; one may have several."""
        return self.sources

    @abstractmethod
    def indices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Index]:
        """Return which part of each of `read_from`, whose whole shapes these are, one rank's shard contains."""

    @abstractmethod
    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Return the shard of one of `size` ranks from the parts that `indices` names."""

    def shard(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """Return the shard of one rank of whole tensors in the order of `sources`."""
        by_name = dict(zip(self.sources, tensors, strict=True))
        read = [by_name[name] for name in self.read_from]
        indices = self.indices([tensor.shape for tensor in read], rank, size)
        return self.join([tensor[index] for tensor, index in zip(read, indices, strict=True)], size)

    @abstractmethod
    def whole(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole tensors in the order of `sources` from the shards of all ranks."""


class Replicated(Weight):
    """A weight that is the same on every rank."""

    def indices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Index]:
        return [(slice(None),)]

    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        return parts[0]

    def whole(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [shards[0]]


class Columns(Weight):
    """A matrix that is split along its inputs."""

    def indices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Index]:
        return [(slice(None), _share(shapes[0][1], rank, size))]

    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        return parts[0]

    def whole(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards), dim=1)]


@dataclass(frozen=True)
class VocabularyRows(Weight):
    """A matrix that is split along the vocabulary, padded with zeros to the same number of rows on each rank."""

    num_tokens: int = 0

    def indices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Index]:
        rows = vocab_rows_per_rank(self.num_tokens, size)
        return [(slice(rank * rows, min((rank + 1) * rows, self.num_tokens)),)]

    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        (part,) = parts
        missing = vocab_rows_per_rank(self.num_tokens, size) - len(part)
        return torch.cat([part, part.new_zeros(missing, part.shape[1])]) if missing else part

    def whole(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: self.num_tokens]]


@dataclass(frozen=True)
class GatedRows(Weight):
    """Several concatenated matrices, each split along its outputs."""

    def indices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Index]:
        return [(_share(shape[0], rank, size),) for shape in shapes]

    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        return torch.cat(list(parts))

    def whole(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = [shard.chunk(len(self.sources)) for shard in shards]
        return [torch.cat(of_one) for of_one in zip(*parts, strict=True)]


@dataclass(frozen=True)
class QueryKeyValue(Weight):
    """Queries, keys and values of attention with `num_groups` groups, each of several queries, a key and a value."""

    num_groups: int = 0
    head_dim: int = 0

    def indices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Index]:
        return [(_share(shape[0], rank, size),) for shape in shapes]  # whole groups, since `size` divides their number

    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        grouped = [part.reshape(self.num_groups // size, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def whole(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        joined = torch.cat(list(shards))
        grouped = joined.reshape(self.num_groups, -1, *joined.shape[1:])
        num_queries = grouped.shape[1] - 2 * self.head_dim
        return [t.flatten(0, 1) for t in grouped.split([num_queries, self.head_dim, self.head_dim], dim=1)]


@dataclass(frozen=True)
class Experts(Weight):
    """A matrix of each expert of a layer, stacked in transformers: [E, rows, columns]; a shard is stacked, too.

    Of the ranks that share the experts, `num_tensor_ranks` in a row hold shards of the same ones: rows of both halves
    of the first matrix (`is_gated`), which are gate and up, or columns of the second.
    """

    num_experts: int = 0
    num_tensor_ranks: int = 1
    is_gated: bool = False
    is_of_experts: bool = True

    @property
    def read_from(self) -> tuple[str, ...]:
        return self.sources * (2 if self.is_gated else 1)

    def tensor_names(self, size: int) -> tuple[str, ...]:
        return tuple(self.name.format(index) for index in range(self.num_experts * self.num_tensor_ranks // size))

    def indices(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Index]:
        width, part = self.num_tensor_ranks, rank % self.num_tensor_ranks
        experts = _share(self.num_experts, rank // width, size // width)
        if not self.is_gated:
            return [(experts, slice(None), _share(shapes[0][2], part, width))]
        half = shapes[0][1] // 2
        own = _share(half, part, width)
        rows = (own, slice(half + own.start, half + own.stop))
        return [(experts, part, slice(None)) for part in rows]

    def join(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        return torch.cat(list(parts), dim=1)

    def whole(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        width = self.num_tensor_ranks
        return [torch.cat([self._join_width(shards[i : i + width]) for i in range(0, len(shards), width)])]

    def _join_width(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the matrices of some experts from the shards of the ranks that share them."""
        if not self.is_gated:
            return torch.cat(list(shards), dim=2)
        halves = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
        return torch.cat([torch.cat(half, dim=1) for half in halves], dim=1)


def vocab_rows_per_rank(num_tokens: int, size: int) -> int:
    """Return the rows of the vocabulary on each tensor-parallel rank, with the last one's padding."""
    return -(-num_tokens // size)


def _share(length: int, rank: int, size: int) -> slice:
    """Return a rank's range of a dimension that `size` ranks divide evenly."""
    return slice(rank * (length // size), (rank + 1) * (length // size))


def iter_model_weights(config: PreTrainedConfig, *, expert_tensor_size: int = 1) -> Iterator[Weight]:
    """Yield all weights of a model in the order of its files; tied ones once, under the name of the embedding.

    `expert_tensor_size` is the number of ranks that share each expert.
    """
    tokens, mixture = config.vocab_size, read_mixture(config)
    yield VocabularyRows("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), num_tokens=tokens)
    for index in range(config.num_hidden_layers):
        to, of = f"decoder.layers.{index}.", f"model.layers.{index}."
        yield from _attention(config, to, of)
        if mixture is not None and mixture.has_experts[index]:
            yield from _experts(mixture, f"{to}mlp.", f"{of}mlp.", expert_tensor_size)
        else:
            yield from _mlp(f"{to}mlp.", f"{of}mlp.")
        yield Replicated(f"{to}input_layernorm.weight", (f"{of}input_layernorm.weight",), is_split=False)
        yield Replicated(f"{to}pre_mlp_layernorm.weight", (f"{of}post_attention_layernorm.weight",), is_split=False)
    yield Replicated("decoder.final_layernorm.weight", ("model.norm.weight",), is_split=False)
    if not config.tie_word_embeddings:
        yield VocabularyRows("output_layer.weight", ("lm_head.weight",), num_tokens=tokens)


def _attention(config: PreTrainedConfig, to: str, of: str) -> Iterator[Weight]:
    attention = "self_attention."
    yield from _query_key_value(config, f"{to}{attention}linear_qkv.", f"{of}self_attn.")
    yield Columns(f"{to}{attention}linear_proj.weight", (f"{of}self_attn.o_proj.weight",))
    if has_output_bias(config):
        yield Replicated(f"{to}{attention}linear_proj.bias", (f"{of}self_attn.o_proj.bias",), is_split=False)
    if has_head_norms(config):
        for letter in "qk":
            source = f"{of}self_attn.{letter}_norm.weight"
            yield Replicated(f"{to}{attention}{letter}_layernorm.weight", (source,), is_split=False)


def _mlp(to: str, of: str) -> Iterator[Weight]:
    yield GatedRows(f"{to}linear_fc1.weight", (f"{of}gate_proj.weight", f"{of}up_proj.weight"))
    yield Columns(f"{to}linear_fc2.weight", (f"{of}down_proj.weight",))


def _experts(mixture: Mixture, to: str, of: str, tensor_size: int) -> Iterator[Weight]:
    yield Replicated(f"{to}router.weight", (f"{of}gate.weight",), is_split=False)
    if mixture.has_bias:
        yield Replicated(f"{to}router.expert_bias", (f"{of}gate.e_score_correction_bias",), is_split=False)
    experts = f"{to}experts.local_experts.{{}}."
    stacked = partial(Experts, num_experts=mixture.num_experts, num_tensor_ranks=tensor_size)
    yield stacked(f"{experts}linear_fc1.weight", (f"{of}experts.gate_up_proj",), is_gated=True)
    yield stacked(f"{experts}linear_fc2.weight", (f"{of}experts.down_proj",))
    if mixture.shared_width is not None:
        yield from _mlp(f"{to}shared_experts.", f"{of}shared_experts.")


def _query_key_value(config: PreTrainedConfig, to: str, of: str) -> Iterator[Weight]:
    for kind in ("weight", "bias") if has_input_bias(config) else ("weight",):
        sources = tuple(f"{of}{letter}_proj.{kind}" for letter in "qkv")
        yield QueryKeyValue(f"{to}{kind}", sources, num_groups=config.num_key_value_heads, head_dim=head_dim(config))


def head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def has_input_bias(config: PreTrainedConfig) -> bool:
    """Return whether queries, keys and values have a bias; Qwen2's always do."""
    return config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False))


def has_output_bias(config: PreTrainedConfig) -> bool:
    return config.model_type not in ("qwen2", "glm4_moe") and bool(getattr(config, "attention_bias", False))


def has_head_norms(config: PreTrainedConfig) -> bool:
    """Return whether queries and keys are normalized per head."""
    return config.model_type in ("qwen3", "qwen3_moe") or bool(getattr(config, "use_qk_norm", False))
