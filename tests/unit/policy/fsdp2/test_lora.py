import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, Qwen2Config

from nemo_rl.errors import ConfigError
from nemo_rl.policy.adapted_layers import check_modules, select_adapted_modules
from nemo_rl.policy.fsdp2.backend import LoraAdapterConfig
from nemo_rl.policy.fsdp2.lora import Adapters, LazyMergedWeight, merge_adapter_weights
from nemo_rl.policy.hf_model import matmul_parameters
from tests.unit.policy.tiny import SIZES, gpt2, qwen2

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def layers(*names: str, of: tuple[int, ...] = (0, 1)) -> list[str]:
    return [f"model.layers.{index}.{name}" for index in of for name in names]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, layers(*ATTENTION, *MLP)),
        ({"match_all_linear": True}, layers(*ATTENTION, *MLP)),
        ({"target_modules": ["q_proj", "v_proj"]}, layers("self_attn.q_proj", "self_attn.v_proj")),
        ({"target_modules": ["self_attn.q_proj"]}, layers("self_attn.q_proj")),
        ({"target_modules": ["model.layers.1.mlp.up_proj"]}, layers("mlp.up_proj", of=(1,))),
        ({"target_modules": ["*.layers.1.*"]}, layers(*ATTENTION, *MLP, of=(1,))),
        ({"exclude_modules": ["*.mlp.*", "*lm_head*"]}, layers(*ATTENTION)),
        ({"target_modules": ["*_proj"], "exclude_modules": ["*.layers.0.*"]}, layers(*ATTENTION, *MLP, of=(1,))),
    ],
)
def test_layers_are_named_by_their_last_part_their_whole_name_or_a_pattern(
    keys: dict[str, Any], expected: list[str]
) -> None:
    assert select_adapted_modules(qwen2(), LoraAdapterConfig(**keys)) == expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"target_modules": ["q_porj"]},
            "lora_cfg.target_modules = 'q_porj': no linear layer .* known: q_proj, k_proj",
        ),
        ({"target_modules": ["lm_head"]}, "lora_cfg.target_modules = 'lm_head'"),
        ({"target_modules": ["embed_tokens"]}, "lora_cfg.target_modules = 'embed_tokens'"),
        ({"exclude_modules": ["*vision*"]}, r"lora_cfg.exclude_modules = '\*vision\*'"),
        ({"exclude_modules": ["*"]}, "lora_cfg.enabled = True: no linear layer of this 'qwen2' model is left"),
    ],
)
def test_names_that_no_layer_has_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_modules(LoraAdapterConfig(enabled=True, **keys), Qwen2Config(**SIZES))


def test_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="of this 'gpt2' model"):
        select_adapted_modules(gpt2(), LoraAdapterConfig(enabled=True))


def test_nothing_is_asked_of_a_model_without_adapters() -> None:
    check_modules(LoraAdapterConfig(target_modules=["q_porj"]), Qwen2Config(**SIZES))


def test_experts_are_no_linear_layers_and_stay_as_they_are() -> None:
    check_modules(LoraAdapterConfig(enabled=True, target_modules=["q_proj"]), MixtralConfig(**SIZES))
    with pytest.raises(ConfigError, match="w1"):
        check_modules(LoraAdapterConfig(enabled=True, target_modules=["w1"]), MixtralConfig(**SIZES))


def test_merged_weight_is_base_plus_scaled_product() -> None:
    base, a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [3.0]])
    tensors = {
        "h.base_layer.weight": base,
        "h.base_layer.bias": torch.ones(2),
        "h.lora_A.default.weight": a,
        "h.lora_B.default.weight": b,
        "norm.weight": torch.zeros(2),
    }
    merged = merge_adapter_weights(tensors, 0.5)
    assert merged.keys() == {"h.weight", "h.bias", "norm.weight"}
    weight = merged["h.weight"]
    assert isinstance(weight, LazyMergedWeight)
    assert weight.shape == base.shape
    assert weight.materialize().tolist() == [[2.0, 1.0], [4.5, 2.5]]
    assert base.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert merged["norm.weight"] is tensors["norm.weight"]


@pytest.mark.parametrize(("how", "largest"), [("xavier", None), ("kaiming", (1 / 32) ** 0.5)])
def test_first_values_follow_the_seed_alone(how: str, largest: float | None) -> None:
    """kaiming: uniform within sqrt(6 / (1 + 5) / inputs), here of 32; xavier: normal, 2 / (32 + 4) its variance."""
    found: list[torch.Tensor] = []
    for draws in (0, 5):
        torch.manual_seed(draws)
        adapters = Adapters(qwen2(), LoraAdapterConfig(dim=4, lora_A_init=how), base="b")  # type: ignore[arg-type]
        adapters.initialize(seed=3)
        tensors = dict(adapters.tensors())
        found.append(torch.cat([t.flatten() for n, t in tensors.items() if "q_proj.lora_A" in n]))
        assert all(not t.any() for n, t in tensors.items() if "lora_B" in n)
    assert torch.equal(*found)
    if largest is None:
        assert found[0].std().item() == pytest.approx((2 / 36) ** 0.5, rel=0.2)
    else:
        assert 0.9 * largest < found[0].abs().max() <= largest


@pytest.mark.parametrize(
    ("patterns", "written"),
    [
        (["q_proj", "up_proj"], {"q_proj", "up_proj"}),
        (["*.layers.1.*.q_proj"], {"model.layers.1.self_attn.q_proj"}),
    ],
)
def test_saved_configuration_names_the_layers_as_shortly_as_it_can(
    patterns: list[str], written: set[str], tmp_path: Path
) -> None:
    adapters = Adapters(qwen2(), LoraAdapterConfig(dim=4, alpha=8, target_modules=patterns), base="the/base")
    adapters.save(dict(adapters.tensors()), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == written
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, "the/base")


def test_frozen_weights_cost_two_thirds() -> None:
    model = qwen2()
    whole = matmul_parameters(model)
    Adapters(model, LoraAdapterConfig(dim=4, target_modules=["q_proj"]), base="b")
    assert matmul_parameters(model) == round(whole * 2 / 3 + 2 * 4 * (32 + 32))


def test_adapters_are_off_only_inside() -> None:
    model = qwen2().eval()
    ids = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        base = model(ids).logits
        adapters = Adapters(model, LoraAdapterConfig(dim=4), base="b")
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
        adapted = model(ids).logits
        with adapters.disabled():
            assert torch.equal(model(ids).logits, base)
        assert torch.equal(model(ids).logits, adapted)
    assert not torch.allclose(adapted, base)
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())
