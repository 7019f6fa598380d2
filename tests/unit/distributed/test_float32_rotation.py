"""Queries and keys that are rotated in float32 and rounded once, as vLLM's kernels do."""

from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GPT2Config, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nemo_rl.distributed import float32
from nemo_rl.distributed.float32 import can_rotate_in_float32, rotate_in_float32
from tests.unit.distributed.test_float32_residual import SIZES, TOKENS, make_model


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return states [B, heads, T, D] rotated by angles [B, T, D], rounded once."""
    one, two = states.float().chunk(2, -1)
    cos, sin = (angles.bfloat16().float().unsqueeze(1).chunk(2, -1)[0] for angles in (cos, sin))
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).bfloat16()


def test_attention_gets_what_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(LlamaConfig(**SIZES), dtype=torch.bfloat16)
    layer, seen = model.model.layers[0], []

    def capture(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.append((query, key))
        return sdpa_attention_forward(module, query, key, *args, **options)

    monkeypatch.setattr(float32, "sdpa_attention_forward", capture)
    inputs: list[torch.Tensor] = []
    layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: inputs.append(output))
    layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: inputs.append(output))
    rotate_in_float32(model)
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    exact = model.model.rotary_emb.forward(torch.zeros(1), torch.arange(TOKENS.shape[1])[None])
    for found, projected in zip(seen[0], inputs, strict=True):
        states = projected.unflatten(-1, (-1, found.shape[-1])).transpose(1, 2)
        assert torch.equal(found, rotated(states, *exact))


@pytest.mark.parametrize(
    ("config", "implementation", "expected"),
    [
        (LlamaConfig(**SIZES), "sdpa", True),
        (GemmaConfig(**SIZES), "sdpa", True),
        (GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4), "sdpa", True),  # it rotates nothing
        (LlamaConfig(**SIZES), "eager", False),  # it multiplies probabilities with values itself
    ],
)
def test_models_whose_attention_takes_queries_of_another_dtype_are_found(
    config: Any, implementation: str, expected: bool
) -> None:
    model = make_model(config, dtype=torch.bfloat16)
    model.set_attn_implementation(implementation)
    assert can_rotate_in_float32(model) is expected
    plain = make_model(config, dtype=torch.bfloat16)
    plain.set_attn_implementation(implementation)
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)  # it is left as it was
