"""config.json of models of the hub, as far as their sizes need it: no test downloads them."""

from typing import Any

_QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
_TIED = {"vocab_size": 151936, "tie_word_embeddings": True}
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, **_TIED}


def _widths(hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        **_widths(4096, 14336, 32, 32, 8),
    },
    "Qwen/Qwen2.5-0.5B": _QWEN2 | _TIED | _widths(896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B": _QWEN2 | _TIED | _widths(1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2 | _TIED | _widths(1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-7B": _QWEN2 | _widths(3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-32B": _QWEN2 | _widths(5120, 27648, 64, 40, 8),
    "Qwen/Qwen3-1.7B": _QWEN3 | _widths(2048, 6144, 28, 16, 8),
    "Qwen/Qwen3-1.7B-Base": _QWEN3 | _widths(2048, 6144, 28, 16, 8),
    "Qwen/Qwen3-8B": _QWEN3 | {"tie_word_embeddings": False} | _widths(4096, 12288, 36, 32, 8),
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_widths(2048, 6144, 48, 32, 4),
    },
    "Qwen/Qwen3-4B": _QWEN3 | _widths(2560, 9728, 36, 32, 8),
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3 | _widths(2560, 9728, 36, 32, 8),
}
