"""Kernels by device and by what is installed; TransformerEngine and Apex are pretended."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.policy.megatron.start import import_megatron
from tests.unit.policy.tiny import SIZES

ALL_OFF = {
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
COMPILED = ALL_OFF | {"bias_activation_fusion": True, "bias_dropout_fusion": True}


class CoreAttention:
    """Stands for an attention."""


@pytest.fixture
def kernels() -> Any:
    import_megatron()
    from nemo_rl.policy.megatron import kernels

    return kernels


@pytest.fixture
def install(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that pretends packages to be installed or missing."""

    def pretend(*modules: str, transformer_engine: str = "") -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(kernels.transformer_engine, "HAVE_TE", bool(transformer_engine))
        parts = tuple(int(part) for part in transformer_engine.split(".") if part)
        monkeypatch.setattr(
            kernels, "is_te_min_version", lambda least: parts >= tuple(int(part) for part in least.split("."))
        )

    return pretend


@pytest.mark.parametrize(
    ("installed", "engine", "expected"),
    [
        ((), "", ALL_OFF),
        (("triton",), "", COMPILED),
        (("triton",), "2.5.0", COMPILED | {"apply_rope_fusion": True}),
        (("triton",), "1.8.0", COMPILED),  # too old for norms of queries and keys
        (("triton", "fused_weight_gradient_mlp_cuda"), "", COMPILED | {"gradient_accumulation_fusion": True}),
    ],
)
def test_a_gpu_uses_what_is_installed_and_a_cpu_nothing(
    kernels: Any, install: Callable[..., None], installed: tuple[str, ...], engine: str, expected: dict[str, bool]
) -> None:
    install(*installed, transformer_engine=engine)
    assert kernels.choose_kernels("cuda").fusions == expected
    assert kernels.choose_kernels("cpu").fusions == ALL_OFF


@pytest.mark.parametrize(
    "model", [Qwen2Config(**SIZES), Qwen3Config(**SIZES, head_dim=8), LlamaConfig(**SIZES, attention_bias=True)]
)
@pytest.mark.parametrize("has_engine", [False, True])
def test_modules_of_a_layer_are_all_of_one_library(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, model: PreTrainedConfig, has_engine: bool
) -> None:
    for name in ("TEColumnParallelLinear", "TERowParallelLinear", "TENorm"):  # a mock where the library is missing
        monkeypatch.setattr(kernels.transformer_engine, name, type(name, (), {}))
    chosen = kernels.Kernels(transformer_engine=has_engine)
    layer = kernels.layer_spec(model, chosen, core_attention=CoreAttention).submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    column, row, norm = (
        ("TEColumnParallelLinear", "TERowParallelLinear", "TENorm")
        if has_engine
        else ("ColumnParallelLinear", "RowParallelLinear", "WrappedTorchNorm")
    )
    assert attention.core_attention is CoreAttention
    assert {layer.input_layernorm.__name__, layer.pre_mlp_layernorm.__name__} == {norm}
    assert {attention.linear_qkv.__name__, mlp.linear_fc1.__name__} == {column}
    assert mlp.linear_fc2.__name__ == row
    assert attention.linear_proj.__name__ == (f"{row}WithBias" if model.model_type == "llama" else row)
    head_norm = norm if model.model_type == "qwen3" else "IdentityOp"
    assert {attention.q_layernorm.__name__, attention.k_layernorm.__name__} == {head_norm}


def test_megatron_accepts_the_options_and_refuses_those_whose_library_is_missing(kernels: Any) -> None:
    from nemo_rl.policy.megatron.model import transformer_config

    policy = PolicyConfig.model_validate({"model_name": "m", "megatron_cfg": {"enabled": True}})
    cuda = torch.device("cuda")
    settings = transformer_config(Qwen2Config(**SIZES), policy, cuda, kernels.Kernels(compiled=True))
    assert settings.bias_activation_fusion
    assert not settings.use_cpu_initialization
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):
        transformer_config(Qwen2Config(**SIZES), policy, cuda, kernels.Kernels(transformer_engine=True))
