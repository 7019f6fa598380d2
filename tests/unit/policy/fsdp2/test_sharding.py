"""Compiled layers, and how much memory whole weights take."""

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo

from nemo_rl.policy.fsdp2 import sharding
from nemo_rl.policy.fsdp2.backend import COMPILED_MODEL_TYPES, TrainedDTensorConfig
from nemo_rl.policy.fsdp2.sharding import compile_layers, kept_unsharded, unsharded_bytes
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from tests.support.quick import quick
from tests.unit.policy.tiny import MODELS, make_batch

LENGTHS = ([9, 5, 12], [7, 7], [20], [8, 2, 2, 2, 9, 3], [3, 4])  # a padded row by itself has its own graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's tracing
@pytest.mark.parametrize(
    "packing_key",
    [
        pytest.param(None, id="padded", marks=pytest.mark.slow),
        pytest.param("policy.sequence_packing.enabled", id="packed"),
    ],
)
@pytest.mark.parametrize(
    ("name", "backend"),
    quick([*((name, "aot_eager") for name in COMPILED_MODEL_TYPES), ("qwen3", "inductor")], [("qwen3", "aot_eager")]),
)
def test_compiled_layers_have_the_same_logprobs_and_gradients(
    name: str, backend: str, packing_key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over micro-batches of several shapes, with recomputed layers; further lengths compile nothing anew.

    A micro-batch is scored without gradients, then trained on. The same graphs reach both backends; inductor's kernels
    for padded batches take a compiler a minute, and are left out.
    """
    if backend == "inductor" and packing_key is None:
        pytest.skip("the kernels of padded batches take a minute")
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    modules = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        module = CausalLogprobs(MODELS[name](), temperature=1.0, chunk_size=None, packing_key=packing_key)
        if is_compiled:
            compile_layers(module.model)
            recompute_activations(decoder_layers(module.model))
        modules.append(module)
    numbers_of_graphs = []
    for lengths in LENGTHS[:3] if backend == "inductor" else LENGTHS:
        batch = make_batch(lengths)
        results = []
        for module in modules:
            inputs = batch["token_ids"], batch["token_mask"] > 0
            with torch.no_grad():
                scored = module(*inputs, lengths=lengths).logprobs
            logprobs = module(*inputs, lengths=lengths).logprobs
            module.zero_grad()
            (logprobs * batch["advantages"]).sum().backward()
            results.append((scored, logprobs, [p.grad for p in module.parameters() if p.grad is not None]))
        torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-4, atol=1e-5)
        for own, expected in zip(results[1][2], results[0][2], strict=True):  # sums, rounded relative to their terms
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().clamp(min=1.0).item())
        numbers_of_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < numbers_of_graphs[0] < numbers_of_graphs[1]  # the first shape, then one of every shape
    assert numbers_of_graphs[2:] == [numbers_of_graphs[2]] * len(numbers_of_graphs[2:])
    assert packing_key is None or numbers_of_graphs[2] == numbers_of_graphs[1]


@pytest.mark.parametrize(
    ("options", "device", "name", "has_triton", "expected"),
    [
        ({}, "cuda", "qwen2", True, True),
        ({}, "cpu", "qwen2", True, False),
        ({}, "cuda", "qwen2", False, False),  # no C compiler, or a device that Triton does not know
        ({}, "cuda", "gemma2", True, False),
        ({"tensor_parallel_size": 2}, "cuda", "qwen2", True, False),
        ({"lora_cfg": {"enabled": True}}, "cuda", "qwen2", True, False),
        ({"compile": True}, "cpu", "gemma2", False, True),
        ({"compile": False}, "cuda", "qwen2", True, False),
    ],
)
def test_layers_are_compiled_by_default_on_cuda_where_triton_works(
    options: dict[str, Any],
    device: str,
    name: str,
    has_triton: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharding, "has_kernels", lambda device: has_triton)
    section = TrainedDTensorConfig.model_validate(options)
    assert sharding.should_compile(MODELS[name](), section, torch.device(device)) is expected


def test_memory_of_whole_weights_and_gradients() -> None:
    layer = torch.nn.Linear(10, 7, bias=False)
    assert unsharded_bytes(layer, "bfloat16") == 70 * (2 + 4)
    assert unsharded_bytes(layer, "float32") == 70 * (4 + 4)
    assert unsharded_bytes(layer.requires_grad_(False), "bfloat16") == 70 * 2


def test_bare_model_has_nothing_to_keep() -> None:
    layer = torch.nn.Linear(3, 2)
    with kept_unsharded(layer, is_enabled=True):
        layer(torch.ones(3)).sum().backward()
    assert layer.weight.grad is not None
