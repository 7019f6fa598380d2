from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from nemo_rl.policy.fsdp2.weights import named_weights
from nemo_rl.policy.saving import copy_weights_to_cpu, save_weights
from tests.unit.policy.tiny import SIZES


def test_experts_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """transformers holds all experts of a layer in one tensor; files and engines have one tensor an expert."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    save_weights(
        copy_weights_to_cpu(named_weights(model, torch.float32)), model, tmp_path / "ours", config_dtype="float32"
    )
    model.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = dict(named_weights(model, torch.float32))
    assert weights.keys() == expected.keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in weights
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))
