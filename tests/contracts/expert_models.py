"""Tiny random mixtures of experts with peaked routers, and the routes that transformers gives their tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.policy.tiny import make_sharing_batch

VOCABULARY, EXPERTS, TOP_K = 300, 8, 2
MISSING = 255  # in a column of up to 255 experts
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def expert_model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a model of 3 layers, the first of which is dense except in Mixtral, whose layers all have experts."""
    torch.manual_seed(seed)
    if kind == "mixtral":
        model: Any = MixtralForCausalLM(
            MixtralConfig(**SIZES, head_dim=32, intermediate_size=128, num_local_experts=EXPERTS)
        )
    elif kind == "qwen3_moe":
        sizes: dict[str, Any] = {
            "head_dim": 32,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "mlp_only_layers": [0],
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, num_experts=EXPERTS, norm_topk_prob=True))
    else:
        sizes: dict[str, Any] = {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
        }
        heads: dict[str, Any] = {
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
        }
        groups: dict[str, Any] = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
        model = DeepseekV3ForCausalLM(
            DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **sizes, **heads, **groups)
        )
        for layer in model.model.layers[1:]:
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
            torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.1)
    return model.to(dtype).eval()


def layers_with_experts(model: Any) -> list[Any]:
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]


@torch.no_grad()
def hf_routes(model: Any, tokens: Sequence[int], cache: Any = None) -> torch.Tensor:
    """Return the experts of each token in ascending order, [tokens, layers with experts, k]."""
    ids: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: ids.append(output[2]))
        for layer in layers_with_experts(model)
    ]
    model(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None)
    for hook in hooks:
        hook.remove()
    return torch.stack(ids, 1).sort(-1).values


def batch_with_routes(lengths: list[int], num_layers: int, *, per_row: bool = False) -> TensorDict:
    """Random experts per distinct prefix, in random order; none of every fifth prefix, nor of last tokens.

    With `per_row` every third row has experts of its own also for prefixes that it shares.
    """
    batch, generator = make_sharing_batch(lengths), torch.Generator().manual_seed(5)
    routes = torch.full((*batch["token_ids"].shape, num_layers, TOP_K), MISSING, dtype=torch.uint8)
    by_prefix: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
    for row, length in enumerate(lengths):
        tokens = batch["token_ids"][row].tolist()
        for at in range(length):
            drawn = torch.rand(num_layers, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]
            missing = torch.full_like(drawn, MISSING)
            new = missing if len(by_prefix) % 5 == 4 else drawn
            owner = row if per_row and row % 3 == 0 else -1
            routes[row, at] = by_prefix.setdefault((owner, tuple(tokens[: at + 1])), new)
    batch["columns"] = TensorDict({"routed_experts": routes}, batch_size=batch.batch_size)
    return batch
