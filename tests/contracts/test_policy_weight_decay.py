"""Weight decay with and without norms and biases: as torch's AdamW steps a plain model, also across a checkpoint."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForCausalLM

from nemo_rl.policy.optimizers import parameter_groups
from nemo_rl.policy.saving import load_optimizer
from tests.contracts.layouts import LENGTHS, Layouts
from tests.contracts.policies import clones
from tests.support.quick import quick
from tests.unit.policy.tiny import WeightedNLL, make_batch, plain_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

KWARGS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.5}
STEPS = [make_batch(LENGTHS, seed=seed) for seed in range(2)]


def stepped_by_hand(path: Path, decays: tuple[bool, bool]) -> dict[str, torch.Tensor]:
    """Return a plain model's weights after two steps, in each of which norms and biases decay or not."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state: dict[torch.Tensor, Any] = defaultdict(dict)
    for batch, decay in zip(STEPS, decays, strict=True):
        small = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("bias")]
        ids = {id(p) for p in small}
        others = [p for p in model.parameters() if id(p) not in ids]
        assert small
        assert others
        groups = [{"params": others}, {"params": small, "weight_decay": 0.5 if decay else 0.0}]
        optimizer = torch.optim.AdamW(groups, **KWARGS)
        optimizer.state = state
        logprobs = plain_logprobs(model, batch)
        optimizer.zero_grad()
        (-(batch["advantages"] * logprobs).sum() / batch["token_mask"].sum()).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", quick(["plain", "2 x tp 2", "megatron tp 2 pp 2"], ["plain", "megatron tp 2 pp 2"]))
@pytest.mark.parametrize("decays", [(False, False), (True, False), (False, True)], ids=str)
def test_norms_and_biases_decay_as_the_key_says_and_a_checkpoint_loads_with_the_other_value(
    decays: tuple[bool, bool], layout: str, run: Layouts, models: dict[str, Path], tmp_path: Path
) -> None:
    first, second = ({"name": "torch.optim.AdamW", "kwargs": KWARGS, "decay_norm_and_bias": decay} for decay in decays)
    save = ("save", tmp_path, {"save_optimizer": True})
    step, next_step = (("train_step", batch, WeightedNLL()) for batch in STEPS)
    run(layout, "qwen2", step, save, ("finish_save",), optimizer=first)
    _, _, weights = run(layout, "qwen2", ("load", tmp_path), next_step, ("run_with_weights", clones), optimizer=second)
    expected = stepped_by_hand(models["qwen2"], decays)
    others = stepped_by_hand(models["qwen2"], (decays[0], not decays[1]))
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-4)
        is_small = expected[name].ndim == 1 and bool(expected[name].any())
        assert ((others[name] - expected[name]).abs().max() > 2e-3) == is_small


def test_the_state_of_an_optimizer_of_one_group_loads_into_two(tmp_path: Path) -> None:
    """As checkpoints of before the key are: torch's own form."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))

    def optimizer_of(*, decay: bool, lr: float) -> torch.optim.Optimizer:
        pairs = [(p.ndim, p) for p in module.parameters()]
        return torch.optim.AdamW(parameter_groups(pairs, decay_norm_and_bias=decay), lr=lr, weight_decay=0.3)

    written = optimizer_of(decay=True, lr=0.1)
    module(torch.ones(1, 3)).square().sum().backward()
    written.step()
    written.zero_grad()
    dcp.save({"optimizer": get_optimizer_state_dict(module, written)}, checkpoint_id=tmp_path)
    read = optimizer_of(decay=False, lr=0.7)
    load_optimizer(module, read, tmp_path)
    assert [(group["lr"], group["weight_decay"]) for group in read.param_groups] == [(0.1, 0.3), (0.1, 0.0)]
    for parameter in module.parameters():
        for kind, value in written.state[parameter].items():
            assert torch.equal(read.state[parameter][kind], value), kind
