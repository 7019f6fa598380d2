"""A float32 residual stream: nearer to the float32 model, for the models whose blocks read it through norms."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from nemo_rl.distributed.float32 import can_compute_as_on_cpu, compute_as_on_cpu

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NUM_SEEDS = 5
TOKENS = 1 + torch.arange(48).reshape(2, 24) * 7 % 63  # no padding token


def make_model(config: PreTrainedConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model whose weights are bfloat16 numbers."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval().to(torch.bfloat16).to(dtype)


def run_model(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the final hidden states and the gradients of all weights, in float32."""
    hidden = model.base_model(TOKENS, use_cache=False).last_hidden_state
    assert hidden.dtype == model.dtype
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden.float() * weights).sum().backward()
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return hidden.detach().float(), torch.cat(gradients)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_outputs_and_gradients_are_nearer_to_those_of_float32(config: Any) -> None:
    """In the mean square over seeds: a single gain is a matter of chance."""
    errors = torch.zeros(2, 2)
    for seed in range(NUM_SEEDS):
        rounded, kept = (make_model(config(**SIZES), seed, dtype=torch.bfloat16) for _ in range(2))
        compute_as_on_cpu(kept)
        exact = run_model(make_model(config(**SIZES), seed))
        for row, model in enumerate((rounded, kept)):
            for column, (found, expected) in enumerate(zip(run_model(model), exact, strict=True)):
                errors[row, column] += (found - expected).square().sum() / expected.square().sum() / NUM_SEEDS
    gains = (errors[1] / errors[0]).sqrt()
    assert gains[0] < 0.85, gains
    assert gains[1] < 0.95, gains


@pytest.mark.parametrize(
    ("config", "expected"),
    [(c(**SIZES), True) for c in (LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Gemma2Config)]
    + [(Olmo2Config(**SIZES), False), (GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4), False)],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_models_whose_blocks_read_the_sums_themselves_are_found(config: PreTrainedConfig, expected: bool) -> None:
    model = make_model(config, dtype=torch.bfloat16)
    assert can_compute_as_on_cpu(model) is expected
    rounded = make_model(config, dtype=torch.bfloat16)
    assert torch.equal(model(TOKENS).logits, rounded(TOKENS).logits)  # it is left as it was
