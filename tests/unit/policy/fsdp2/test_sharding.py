"""Compiled layers, and how much memory whole weights take."""

from functools import partial

import pytest
import torch
import torch._dynamo

from nemo_rl.policy.fsdp2.sharding import compile_layers, kept_unsharded, unsharded_bytes
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs
from tests.unit.policy.tiny import MODELS, make_batch


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's tracing
@pytest.mark.parametrize(
    ("packing_key", "backend"), [(None, "aot_eager"), ("policy.sequence_packing.enabled", "inductor")]
)
def test_compiled_layers_have_the_same_logprobs_and_gradients(
    packing_key: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over micro-batches of several shapes, with recomputed layers; packs of other lengths compile nothing anew.

    Padded batches end with the same graphs, without the minute that a compiler takes for their kernels.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    modules = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        module = CausalLogprobs(MODELS["qwen3"](), temperature=1.0, chunk_size=None, packing_key=packing_key)
        if is_compiled:
            compile_layers(module.model)
            recompute_activations(decoder_layers(module.model))
        modules.append(module)
    numbers_of_graphs = []
    for lengths in ([9, 5, 12], [7, 7], [8, 2, 2, 2, 9, 3]):
        batch = make_batch(lengths)
        results = []
        for module in modules:
            logprobs = module(batch["token_ids"], batch["token_mask"] > 0, lengths=lengths).logprobs
            module.zero_grad()
            (logprobs * batch["advantages"]).sum().backward()
            results.append((logprobs, [p.grad for p in module.parameters()]))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        numbers_of_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < numbers_of_graphs[0] < numbers_of_graphs[1]  # the first shape, then one of every shape
    assert len(set(numbers_of_graphs[1:])) == 1


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
