"""Expected memory of a model on one of its ranks, from the sizes in its config.json. Loads no torch.

FSDP2 keeps 4 bytes of weights, 4 of gradients and 8 of Adam's state per parameter, sharded (ZeRO-3, arXiv 1910.02054),
gathers two layers at a time in the precision, and reduces gradients in float32. Activations follow arXiv 2205.05198,
section 4.1, for RMSNorm, SwiGLU and flash attention. tests/unit/policy/test_memory.py derives and bounds the formulas
by what the real modules allocate. launch/memory_plan.py adds engines and processes. Sizes are bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.moe import EXPERT_COUNTS

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # dense decoders with SwiGLU and RMSNorm
EXPERT_MODEL_TYPES = ("qwen3_moe", "mixtral")  # the same with experts in place of each MLP
EXPERT_WIDTHS = ("moe_intermediate_size", "intermediate_size")  # Mixtral has no other MLP
ADAM_BYTES = 8  # optimizer state per trained parameter
OPTIMIZER_BYTES = {"SGD": 4, "Adagrad": 4, "RMSprop": 4}  # others as Adam
LOGIT_BYTES = 6  # per logit: bfloat16 and float32, which its gradient overwrites
BLOCK_BYTES = 2**28  # intermediate results of the log-probs (policy/log_softmax.py, ACCELERATOR_BLOCK)


class UnknownShapeError(Exception):
    """The sizes of a model are unknown here; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Widths of a decoder, dense or with experts in every layer, under config.json's names."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    has_qkv_bias: bool = False
    has_head_norms: bool = False  # norms of queries and keys (Qwen3)
    num_experts: int = 0  # per layer; 0: one MLP
    num_experts_per_token: int = 0
    expert_width: int = 0

    @classmethod
    def from_config(cls, name: str, values: Mapping[str, Any]) -> "ModelShape":
        """Return the shape that a config.json describes; raises UnknownShapeError for another kind of model."""
        kind = values.get("model_type")
        known = (*MODEL_TYPES, *EXPERT_MODEL_TYPES)
        if kind not in known:
            raise UnknownShapeError(f"{name} is of type {kind!r}; sizes are known of {', '.join(known)}")
        try:
            heads, hidden_size = int(values["num_attention_heads"]), int(values["hidden_size"])
            return cls(
                name=name,
                hidden_size=hidden_size,
                intermediate_size=int(values["intermediate_size"]),
                num_hidden_layers=int(values["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(values.get("num_key_value_heads") or heads),
                head_dim=int(values.get("head_dim") or hidden_size // heads),
                vocab_size=int(values["vocab_size"]),
                is_tied=bool(values.get("tie_word_embeddings", False)),
                has_qkv_bias=kind == "qwen2" or bool(values.get("attention_bias", False)),
                has_head_norms=kind in ("qwen3", "qwen3_moe"),
                **(_expert_sizes(name, values) if kind in EXPERT_MODEL_TYPES else {}),
            )
        except KeyError as error:
            raise UnknownShapeError(f"config.json of {name} has no {error.args[0]}") from error

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden_size * (2 * self.query_width + 2 * self.key_value_width)
        biases = (self.query_width + 2 * self.key_value_width) * self.has_qkv_bias
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.has_head_norms
        router = self.hidden_size * self.num_experts
        mlp = (
            router + self.layer_expert_parameters if self.num_experts else 3 * self.hidden_size * self.intermediate_size
        )
        return attention + biases + mlp + norms

    @property
    def layer_expert_parameters(self) -> int:
        """Return the parameters of a layer's experts."""
        return 3 * self.num_experts * self.hidden_size * self.expert_width

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of the experts of all layers.

        Example: Qwen3-30B-A3B has 48 layers of 128 experts of 3 x 2048 x 768: 28,991,029,248.
        """
        return self.num_hidden_layers * self.layer_expert_parameters

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the output layer, which are the embedding's if the two are tied."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Return the parameters outside the layers: embedding, output layer, last norm."""
        return self.head_parameters * (1 if self.is_tied else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        """Return the number of all parameters.

        Example: Qwen2.5-1.5B has 28 layers of 46,797,824 and 233,375,232 besides: 1,543,714,304.
        """
        return self.num_hidden_layers * self.layer_parameters + self.root_parameters

    def adapter_parameters(self, dim: int) -> int:
        """Return the parameters of LoRA adapters of all linear layers but the output layer: dim (in + out) each.

        Experts and routers have none.
        """
        hidden, query, key_value = self.hidden_size, self.query_width, self.key_value_width
        mlp = 0 if self.num_experts else 3 * (hidden + self.intermediate_size)
        sizes = 2 * (hidden + query) + 2 * (hidden + key_value) + mlp
        return self.num_hidden_layers * dim * sizes

    def cache_bytes(self, tokens: int, bytes_per_number: int = 2) -> int:
        """Return the keys and values of that many tokens in all layers.

        Example: Qwen2.5-1.5B in bfloat16: 2 x 28 layers x 256 x 2 = 28,672 bytes per token.
        """
        return 2 * self.num_hidden_layers * self.key_value_width * bytes_per_number * tokens


def _expert_sizes(name: str, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a mixture's experts; raises UnknownShapeError if some layers have none."""
    if values.get("decoder_sparse_step", 1) != 1 or values.get("mlp_only_layers"):
        raise UnknownShapeError(f"{name} has layers without experts")
    return {
        "num_experts": next(int(values[key]) for key in EXPERT_COUNTS if values.get(key)),
        "num_experts_per_token": int(values["num_experts_per_tok"]),
        "expert_width": next(int(values[key]) for key in EXPERT_WIDTHS if values.get(key)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The parts of one rank's memory, and everything that they depend on."""

    shape: ModelShape
    compute_bytes: int = 2  # per number in forward and backward
    data: int = 1  # ranks that share the tokens of a step and, with FSDP2, the weights
    context: int = 1  # those among them that share each micro-batch
    tensor: int = 1
    stages: int = 1
    experts: int = 1  # ranks that divide a layer's experts among them; loads are assumed to be equal
    expert_tensor: int = 1  # ranks that share each expert (Megatron)
    train_tokens: int = 0  # per micro-batch, over all ranks that share it
    score_tokens: int = 0  # the same per pass without gradients
    longest: int = 1  # tokens of the longest sample, the least that a micro-batch can have
    chunk: int | None = 1024  # positions whose logits exist at once
    recomputes: bool = False  # activation_checkpointing
    splits_residual: bool = False  # sequence_parallel: a tensor rank has a part of the tokens between matrices
    is_offloaded: bool = False  # cpu_offload
    is_frozen: bool = False  # a teacher, in its precision
    is_replicated: bool = False  # each data-parallel rank holds whole weights and gradients, as with Megatron
    is_optimizer_whole: bool = False  # and whole float32 weights and optimizer state: no distributed optimizer
    is_kept_whole: bool = False  # keep_unsharded: whole weights and gradients for all micro-batches of a step
    adapter_dim: int | None = None
    num_adapters: int = 1  # of several policies on one base; gradients are those of one of them at a time
    num_trained_adapters: int = 1  # with an optimizer state each
    optimizer_bytes: int = ADAM_BYTES
    has_reference: bool = False

    @property
    def own_parameters(self) -> int:
        """Return the number of parameters that data-parallel ranks divide.

        These are all experts, and of the rest a tensor-parallel part; if no weights are divided, its own experts.
        """
        return self._own_dense + self._own_experts

    @property
    def trained_parameters(self) -> int:
        if self.is_frozen:
            return 0
        if self.adapter_dim is None:
            return self.own_parameters
        return self.shape.adapter_parameters(self.adapter_dim) // (self.tensor * self.stages)

    @property
    def weights(self) -> int:
        """Return the rank's weights: float32, frozen ones in the precision, replicated ones in both."""
        own = self.own_parameters
        if self.is_replicated:
            has_main_weights = self.compute_bytes == 2 and not self.is_frozen
            return self.compute_bytes * own + (4 * self._stepped_parameters if has_main_weights else 0)
        if self.is_frozen or self.adapter_dim is not None:
            return (self.compute_bytes * own + 4 * self.num_adapters * self.trained_parameters) // self.data
        return 4 * own // self.data

    @property
    def gradients(self) -> int:
        return 4 * self.trained_parameters // self._shards

    @property
    def optimizer(self) -> int:
        return self.optimizer_bytes * self._stepped_parameters * self.num_trained_adapters

    @property
    def reference(self) -> int:
        """Return the frozen copy of the initial weights; adapters need none."""
        if not self.has_reference or self.adapter_dim is not None:
            return 0
        return self.compute_bytes * self.own_parameters // self._shards

    @property
    def layer_activations(self) -> int:
        """Return the bytes that a layer keeps per token for its backward pass.

        Two norms keep a float32 copy of their input, the normalized values and their output, which is gathered if the
        residual stream is divided; attention keeps queries, keys, values, its output and a log-sum-exp per head; the
        MLP four vectors of its width. Each expert of the token keeps four of its own, the hidden state that it was
        sent, and its result on both sides; Megatron's tensor-parallel ranks each send a part of the tokens.
        """
        shape, size = self.shape, self.compute_bytes
        norms = 2 * ((4 + size) * shape.hidden_size // self._residual_parts + size * shape.hidden_size)
        attention = size * (2 * shape.query_width + 2 * shape.key_value_width) + 4 * shape.num_attention_heads
        if shape.num_experts:
            each = size * (4 * shape.expert_width + 3 * self.expert_tensor * shape.hidden_size)
            sent = shape.num_experts_per_token * each // (self.tensor if self.is_replicated else 1)
            return norms + attention // self.tensor + sent
        return norms + (attention + 4 * size * shape.intermediate_size) // self.tensor

    @property
    def activations(self) -> int:
        """Return the bytes that a micro-batch keeps between forward and backward."""
        layers, tokens = math.ceil(self.shape.num_hidden_layers / self.stages), self._slice(self.train_tokens)
        if not self.recomputes:
            return layers * tokens * self.layer_activations
        kept = self.compute_bytes * self.shape.hidden_size // self._residual_parts
        return layers * tokens * kept + tokens * self.layer_activations

    @property
    def gathered(self) -> int:
        """Return whole weights and gradients at the worst moment of a backward pass, with the logits of a chunk.

        At the output layer: gathered weights, the gradient of its matrix and its sum, and layers in transfer; in
        the layers: two of them gathered, a gradient, and its float32 copy for the reduction; at the end the root's.
        Gathered are the root's weights or, with `is_kept_whole`, all; gradients are then summed whole, unreduced.
        """
        size, layer, root, head = self.compute_bytes, self._layer, self._root, self.shape.head_parameters // self.tensor
        logits, weights, sums = self._logits(LOGIT_BYTES), size * root, 0
        if self.is_kept_whole:
            weights, sums = self._whole_weights, 4 * self._whole_trained - self.gradients
        if self.adapter_dim is not None:
            return weights + sums + logits + (0 if self.is_kept_whole else 3 * size * layer)
        at_head = max(logits + size * head, self._logits(size) + 2 * size * head) + 4 * size * layer
        in_layers = size * head + (3 * size + 4) * layer
        at_end = (size + 4) * root + 4 * layer
        return weights + sums + max(at_head, in_layers, at_end) + BLOCK_BYTES

    @property
    def scoring(self) -> int:
        """Return gathered weights, logits and activations of a pass without gradients.

        On several ranks the first all-gathers have buffers of their own.
        """
        size, pair = self.compute_bytes, self.compute_bytes * (self._root + 2 * self._layer)
        shape = self.shape
        mlp = 3 * size * shape.intermediate_size // self.tensor
        if shape.num_experts:
            mlp = 3 * size * shape.num_experts_per_token * (shape.expert_width + shape.hidden_size)
        widths = 8 * shape.hidden_size + mlp
        weights = self._whole_weights if self.is_kept_whole else pair
        gathered = 0 if self.is_frozen and self.data == 1 else weights
        buffers = pair if self.data > 1 else 0
        logits = self._logits(LOGIT_BYTES) + 2 * BLOCK_BYTES
        return gathered + max(buffers, logits) + self._slice(self.score_tokens) * widths

    def allows_context(self, size: int) -> bool:
        """Return whether that many ranks can share a micro-batch: they exchange its tokens for equal parts of heads."""
        return self.shape.num_attention_heads // self.tensor % size == 0

    @property
    def _whole_weights(self) -> int:
        adapters = 0 if self.adapter_dim is None else self.trained_parameters
        return self.compute_bytes * (self.own_parameters - self._experts_elsewhere + adapters)

    @property
    def _whole_trained(self) -> int:
        elsewhere = self._experts_elsewhere if self.adapter_dim is None else 0
        return self.trained_parameters - elsewhere

    @property
    def _experts_elsewhere(self) -> int:
        """Return those of `own_parameters` that the rank never gathers: experts that it does not compute."""
        experts = self.shape.expert_parameters // self.stages
        return 0 if self.is_replicated else experts - experts // self.experts

    @property
    def whole_bytes(self) -> int:
        """Return the memory of whole weights and their gradients in float32, as `is_kept_whole` would keep them."""
        adapters = 0 if self.adapter_dim is None else self.compute_bytes * self.trained_parameters
        return self._whole_weights - adapters + 4 * self._whole_trained

    @property
    def _shards(self) -> int:
        return 1 if self.is_replicated else self.data

    @property
    def _own_dense(self) -> int:
        return (self.shape.parameters - self.shape.expert_parameters) // (self.tensor * self.stages)

    @property
    def _own_experts(self) -> int:
        """Return the parameters of experts that data-parallel ranks divide, or whole copies of which they hold."""
        return self.shape.expert_parameters // (self.stages * (self._expert_ranks if self.is_replicated else 1))

    @property
    def _expert_ranks(self) -> int:
        return self.experts * self.expert_tensor

    @property
    def _stepped_parameters(self) -> int:
        """Return the parameters whose optimizer state the rank has; experts have copies of their own.

        Example: 8 data x 2 tensor-parallel ranks with experts over 4 ranks have 8 copies of the rest and 4 of experts.
        """
        if self.is_optimizer_whole or self.is_frozen:
            return self.trained_parameters
        if not self.is_replicated or self.adapter_dim is not None:
            return self.trained_parameters // self.data
        copies_of_experts = self.data * self.tensor // self._expert_ranks
        return self._own_dense // self.data + self._own_experts // copies_of_experts

    @property
    def _layer(self) -> int:
        """Return the parameters of a layer that the rank gathers, or casts, to compute with them."""
        experts = self.shape.layer_expert_parameters
        return (self.shape.layer_parameters - experts) // self.tensor + experts // self._expert_ranks

    @property
    def _root(self) -> int:
        return self.shape.root_parameters // self.tensor

    @property
    def _residual_parts(self) -> int:
        return self.tensor if self.splits_residual else 1

    def _slice(self, tokens: int) -> int:
        """Return a rank's tokens of a micro-batch."""
        return -(-tokens // self.context)

    def _logits(self, size: int) -> int:
        tokens = self._slice(max(self.train_tokens, self.score_tokens))
        return size * min(self.chunk or tokens, tokens) * self.shape.vocab_size // self.tensor
