"""A bfloat16 policy on a CPU keeps its residual stream in float32, under every option and on every layout of FSDP2."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.distributed import float32
from nemo_rl.policy.hf_model import decoder_layers
from tests.contracts.layouts import BATCHING, FSDP2, FSDP2_ALONE, LENGTHS, Layouts
from tests.contracts.policies import SGD, clones, make_policy
from tests.unit.policy.tiny import WeightedNLL, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")

RECOMPUTED: dict[str, Any] = {"dtensor_cfg": {"activation_checkpointing": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "packed": BATCHING["packed"],
    "recomputed": RECOMPUTED,
    "offloaded": {"dtensor_cfg": {"cpu_offload": True}},
    "kept whole": {"train_micro_batch_size": 1, "dtensor_cfg": {"keep_unsharded": True}},
    "sharing prefixes": {
        "sequence_packing": {**BATCHING["packed"]["sequence_packing"], "share_prefixes": True},
        **RECOMPUTED,
    },
}
EACH = [("plain", name) for name in VARIANTS] + [(layout, "recomputed") for layout in FSDP2]


@pytest.mark.parametrize(("layout", "variant"), EACH)
def test_residual_is_float32_and_gradients_do_not_depend_on_options(layout: str, variant: str, run: Layouts) -> None:
    """Gradients are as near to those of the plain policy as bfloat16 sums in another order are."""
    batch = make_batch(LENGTHS)
    calls = [
        ("run_with_weights", clones),
        ("types_of_residual_stream", batch),
        ("train_step", batch, WeightedNLL()),
        ("run_with_weights", clones),
    ]
    # The refit is of bfloat16 weights: a step of 100 gradients is not lost in their rounding.
    config: dict[str, Any] = {"precision": "bfloat16", "optimizer": {**SGD, "kwargs": {"lr": 100.0}}}
    before, _, _, expected = run("plain", "qwen3", *calls, **config)
    _, types, _, found = run(layout, "qwen3", *calls, **config, **VARIANTS[variant])
    assert types == {torch.float32}
    step = torch.cat([(expected[name] - before[name]).flatten().float() for name in before])
    difference = torch.cat([(found[name] - expected[name]).flatten().float() for name in before])
    assert step.norm() > 0.0
    assert difference.norm() < 0.03 * step.norm()


@pytest.mark.parametrize("layout", ["plain", "2 ranks"])
def test_residual_of_a_policy_with_adapters_and_its_reference_is_float32(layout: str, run: Layouts) -> None:
    batch = make_batch(LENGTHS)
    calls = [
        ("types_of_residual_stream", batch),
        ("train_step", batch, WeightedNLL()),
        ("reference_logprobs", batch),
        ("types_of_residual_stream", batch),
    ]
    config = {"precision": "bfloat16", "needs_reference": True, "dtensor_cfg": {"lora_cfg": {"enabled": True}}}
    before, metrics, reference, after = run(layout, "qwen3", *calls, **config)
    assert before == after == {torch.float32}
    assert metrics["grad_norm"] > 0
    assert reference.isfinite().all()


def test_other_models_round_and_say_so(run: Layouts, caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2's norms take inputs of the type of their weights alone."""
    with caplog.at_level(logging.WARNING):
        (types,) = run("plain", "gpt2", ("types_of_residual_stream", make_batch(LENGTHS)), precision="bfloat16")
    assert types == {torch.bfloat16}
    assert "GPT2LMHeadModel does not read its residual stream through norms" in caplog.text


def test_fsdp2_leaves_the_rotation_in_float32_beside_a_residual_stream_that_rounds(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: cosines and sines reach attention as they were made, hidden states in bfloat16."""
    monkeypatch.setattr(float32, "can_compute_as_on_cpu", lambda model: False)
    policy = make_policy(FSDP2_ALONE, models["qwen3"], precision="bfloat16")
    seen: set[tuple[torch.dtype, ...]] = set()

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.add((kwargs["hidden_states"].dtype, *(each.dtype for each in kwargs["position_embeddings"])))

    layers: list[Any] = list(decoder_layers(policy.module))
    for layer in layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    policy.train_step(make_batch(LENGTHS), WeightedNLL())
    policy.close()
    assert seen == {(torch.bfloat16, torch.float32, torch.float32)}
