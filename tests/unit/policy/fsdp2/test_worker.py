from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from nemo_rl.policy.fsdp2.worker import clip_grad_norm, named_weights
from nemo_rl.policy.saving import BackgroundSave, save_weights
from tests.unit.policy.tiny import SIZES


def test_experts_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """transformers holds all experts of a layer in one tensor; files and engines have one tensor an expert."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
    copies = BackgroundSave(torch.device("cpu")).copy_weights(named_weights(model, torch.float32))
    save_weights(copies, model, tmp_path / "ours", config_dtype="float32")
    model.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = dict(named_weights(model, torch.float32))
    assert weights.keys() == expected.keys()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in weights
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("max_norm", "expected"), [(None, [3.0, 4.0]), (10.0, [3.0, 4.0]), (1.0, [0.6, 0.8])])
def test_gradients_are_scaled_to_the_largest_norm_allowed(max_norm: float | None, expected: list[float]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, gradient in zip(parameters[:2], (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient])
    assert clip_grad_norm(parameters, max_norm) == pytest.approx(5.0)
    assert [float(p.grad) for p in parameters[:2] if p.grad is not None] == pytest.approx(expected, rel=1e-4)
