"""The output layer of vLLM's CPU engine keeps the float32 sums of bfloat16 products, and leaves all else to vLLM."""

from typing import Any

import pytest
import torch

from nemo_rl.generation.vllm.engine import importing_vllm

with importing_vllm("cpu"):
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from nemo_rl.generation.vllm import logits, worker


def make_processor(head_dtype: torch.dtype | None) -> Any:
    """Return what vLLM makes where a model asks for its LogitsProcessor, without the engine's configuration."""
    processor: Any = LogitsProcessor.__new__(LogitsProcessor)
    torch.nn.Module.__init__(processor)
    processor.head_dtype = head_dtype
    return processor


def make_head() -> Any:
    head: Any = torch.nn.Linear(64, 37, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    head.quant_method = UnquantizedEmbeddingMethod()
    head.cpu_linear = torch.nn.functional.linear
    return head


def test_workers_make_this_output_layer():
    assert worker.logits is logits
    assert type(make_processor(None)) is logits.Float32LogitsProcessor


@pytest.mark.parametrize("head_dtype", [None, torch.bfloat16, torch.float32])
def test_logits_are_float32_sums_where_the_engine_asks_for_float32(
    monkeypatch: pytest.MonkeyPatch, head_dtype: torch.dtype | None
):
    torch.manual_seed(0)
    head, hidden, calls = make_head(), torch.randn(5, 64).bfloat16(), []
    product = logits.float32_product
    monkeypatch.setattr(logits, "float32_product", lambda *args: (calls.append(args), product(*args))[1])
    found = make_processor(head_dtype)._apply_head(head, hidden, None)
    exact = hidden.double() @ head.weight.double().T
    assert len(calls) == (head_dtype is torch.float32)
    assert ((found - exact).abs().max() < 1e-5) == (head_dtype is torch.float32)


def test_quantised_or_biased_heads_are_left_to_vllm():
    head, bias = make_head(), torch.ones(37, dtype=torch.bfloat16)
    hidden = torch.randn(5, 64).bfloat16()
    found = make_processor(torch.float32)._apply_head(head, hidden, bias)
    torch.testing.assert_close(found.double(), hidden.double() @ head.weight.double().T + 1, atol=1e-5, rtol=0)
    head.quant_method = object()
    with pytest.raises(ValueError, match="unquantized"):
        make_processor(torch.float32)._apply_head(head, hidden, None)
