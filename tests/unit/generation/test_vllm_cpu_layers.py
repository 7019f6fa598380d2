"""The output layer of vLLM's CPU engine keeps the float32 sums of bfloat16 products, and leaves all else to vLLM; its
norms keep the residual stream in float32; its sampler draws for a request what its seed and position say."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nemo_rl.generation.vllm.process_environment import importing_vllm

with importing_vllm("cpu"):
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from nemo_rl.generation.vllm.cpu import layers, worker


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


def test_workers_make_these_layers(norm: Any) -> None:
    assert worker.layers is layers
    assert type(make_processor(None)) is layers.Float32LogitsProcessor
    assert type(norm) is layers.Float32ResidualRMSNorm


@pytest.mark.parametrize("head_dtype", [None, torch.bfloat16, torch.float32])
def test_logits_are_float32_sums_where_the_engine_asks_for_float32(
    monkeypatch: pytest.MonkeyPatch, head_dtype: torch.dtype | None
):
    torch.manual_seed(0)
    head, hidden, calls = make_head(), torch.randn(5, 64).bfloat16(), []
    product = layers.float32_product
    monkeypatch.setattr(layers, "float32_product", lambda *args: (calls.append(args), product(*args))[1])
    found = make_processor(head_dtype)._apply_head(head, hidden, None)
    exact = hidden.double() @ head.weight.double().T
    assert len(calls) == (head_dtype is torch.float32)
    assert ((found - exact).abs().max() < 1e-5) == (head_dtype is torch.float32)


def test_quantised_or_biased_heads_are_left_to_vllm():
    head, bias = make_head(), torch.ones(37, dtype=torch.bfloat16)
    hidden = torch.randn(5, 64).bfloat16()
    found = make_processor(torch.float32)._apply_head(head, hidden, bias)
    torch.testing.assert_close(found.double(), hidden.double() @ head.weight.double().T + 1, atol=1e-5, rtol=0)
    quantised: Any = torch.nn.Module()  # without a weight of that name, as GPTQ's, which has qweight
    quantised.quant_method = Mock(apply=lambda layer, states, bias: states * 2)
    assert torch.equal(make_processor(None)._apply_head(quantised, hidden, None), hidden * 2)
    with pytest.raises(ValueError, match="unquantized"):
        make_processor(torch.float32)._apply_head(quantised, hidden, None)


@pytest.fixture(params=["all", "none"])
def norm(request: pytest.FixtureRequest) -> Any:
    """Return what vLLM makes where a model of bfloat16 asks for its RMSNorm on a CPU, with and without compiling."""
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=[request.param]))):
        made = RMSNorm(64, eps=1e-5, dtype=torch.bfloat16).requires_grad_(False)
    made.weight.copy_(torch.randn(64, generator=torch.Generator().manual_seed(3)))
    return made


def exact_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.double()
    return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()


def test_residual_stream_is_summed_in_float32(norm: Any) -> None:
    """Over 60 blocks, as in a model of 30 layers; each norm is the bfloat16 number next to that of the sum."""
    blocks = torch.randn(60, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    residual, exact = blocks[0], blocks[0].double()
    for block in blocks[1:]:
        normed, residual = norm(block.clone(), residual)
        exact = exact + block.double()
        expected = exact_norm(norm, exact)
        assert normed.dtype == torch.bfloat16
        assert ((normed.double() - expected).abs() <= expected.abs() * 2**-8).all()
    assert residual.dtype == torch.float32
    assert (residual - exact).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # float32: a model has added it up itself
def test_norm_without_a_residual_is_rounded_once(norm: Any, dtype: torch.dtype) -> None:
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    normed = norm(hidden)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), exact_norm(norm, hidden), rtol=2**-8, atol=0)


def test_norm_of_a_part_of_the_columns_is_left_to_vllm(norm: Any) -> None:
    norm.variance_size_override = 32
    hidden, residual = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = norm(hidden.clone(), residual.clone())
    expected = RMSNorm.forward_native(norm, hidden.clone(), residual.clone())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def seeded(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_numbers_of_a_request_are_those_of_splitmix64() -> None:
    """Seed 0 mixes to 0, so that its stream is the published one of SplitMix64 from the state 0."""
    streams, generators = layers.RequestStreams(), seeded(0)
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [int(streams.next_seeds(generators, 1)) for _ in range(3)] == [number >> 33 for number in published]


def test_numbers_depend_on_seed_and_position_alone() -> None:
    """Not on the row, nor on the others of the batch, nor on steps in which the request waited."""
    alone, together = layers.RequestStreams(), layers.RequestStreams()
    one, other = torch.Generator().manual_seed(2**63 - 1), torch.Generator().manual_seed(5)
    expected = [int(alone.next_seeds({0: one}, 1)) for _ in range(3)]
    first = together.next_seeds({2: one, 0: other}, 3)
    together.next_seeds({0: other}, 1)
    found = [first[2], together.next_seeds({0: one}, 1)[0], together.next_seeds({1: one}, 4)[1]]
    assert [int(number) for number in found] == expected
    assert len(set(expected)) == 3
    assert int(first[0]) != expected[0]


def make_sampler() -> TopKTopPSampler:
    sampler = TopKTopPSampler("processed_logprobs")
    layers.use_request_streams(sampler)
    return sampler


def test_seeded_samples_follow_the_distribution_and_its_logprobs() -> None:
    """20,000 rows, a request each: shares within five standard deviations."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().repeat(20_000, 1) + 3
    chosen, logprobs = make_sampler()(logits.clone(), seeded(*range(20_000)), None, None)
    assert logprobs is not None
    torch.testing.assert_close(logprobs[7].exp(), probabilities)
    shares = torch.bincount(chosen.flatten(), minlength=4) / 20_000
    assert ((shares - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / 20_000).sqrt()).all()


def test_one_request_samples_anew_at_each_position() -> None:
    sampler, generators = make_sampler(), seeded(11)
    drawn = [int(sampler(torch.zeros(1, 1000), generators, None, None)[0]) for _ in range(50)]
    again, others = make_sampler(), seeded(11)
    assert [int(again(torch.zeros(1, 1000), others, None, None)[0]) for _ in range(50)] == drawn
    assert len(set(drawn)) > 40


def test_truncated_distribution_is_sampled_and_scored() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).repeat(500, 1)
    chosen, logprobs = make_sampler()(logits, seeded(*range(500)), torch.full((500,), 2), None)
    assert logprobs is not None
    assert set(chosen.flatten().tolist()) == {0, 1}
    torch.testing.assert_close(logprobs[0].exp().sum(), torch.tensor(1.0))
    assert logprobs[0, 2] == -torch.inf


@pytest.mark.parametrize("case", ["no seeds", "logits as log-probs", "noise in float64"])
def test_other_requests_are_left_to_vllm(case: str) -> None:
    sampler = TopKTopPSampler("processed_logits" if case == "logits as log-probs" else "processed_logprobs")
    sampler.use_fp64_gumbel = case == "noise in float64"
    sampler.forward = Mock(return_value="vLLM's")
    layers.use_request_streams(sampler)
    logits, generators = torch.zeros(2, 10), {} if case == "no seeds" else seeded(1, 2)
    assert sampler(logits, generators, None, None) == "vLLM's"
