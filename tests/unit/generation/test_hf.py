import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_rl.generation import hf
from nemo_rl.generation.hf import HFGeneration, filter_logits, sample_token, to_weight_spans
from nemo_rl.token_columns import NO_COLUMNS, sampling_mask_columns
from nemo_rl.types import SamplingParams, WeightSpan
from tests.contracts.engines import answers, request, save_tiny_model


def test_top_k_keeps_the_best():
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0])
    assert filter_logits(logits, SamplingParams(1, top_k=2)).tolist() == [-torch.inf, 3.0, 2.0, -torch.inf]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert filter_logits(logits, SamplingParams(1, top_p=0.4)).isfinite().tolist() == [True, False, False]
    assert filter_logits(logits, SamplingParams(1, top_p=0.6)).isfinite().tolist() == [True, True, False]
    assert filter_logits(logits, SamplingParams(1, top_p=0.9)).isfinite().tolist() == [True, True, True]


def test_log_prob_is_of_the_tempered_distribution():
    logits = torch.tensor([0.0, 1.0])
    token, logprob = sample_token(logits / 0.5, torch.Generator().manual_seed(0))
    assert logprob == pytest.approx(float((logits / 0.5).log_softmax(-1)[token]), abs=1e-6)


def test_frequencies_follow_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.7, 0.2, 0.1]).log()
    draws = [sample_token(logits, generator)[0] for _ in range(4000)]
    counts = torch.bincount(torch.tensor(draws), minlength=3) / 4000
    torch.testing.assert_close(counts, torch.tensor([0.7, 0.2, 0.1]), atol=0.03, rtol=0)


def test_sets_are_recorded_with_ties_and_up_to_their_limit():
    """Top-2 of a tie keeps three; a set of more than 512 tokens is missing."""
    sampling = SamplingParams(1, top_k=2, return_sampling_mask=True)
    tied = filter_logits(torch.tensor([1.0, 0.0, 3.0, 1.0]), sampling).isfinite().nonzero()[:, 0].numpy()
    columns = sampling_mask_columns([tied, np.arange(513), np.arange(1)], num_prompt_tokens=1)
    assert columns["sampling_mask"].tolist() == [[-1] * 3, [0, 2, 3], [-1] * 3, [0, -1, -1]]
    assert sampling_mask_columns([], num_prompt_tokens=3) is NO_COLUMNS


def test_same_batch_gives_the_same_bits(tmp_path: Path):
    async def main():
        engine = HFGeneration(str(save_tiny_model(tmp_path, tied=True)), max_batch_size=2)
        requests = [request(str(i), tokens=range(3, 6 + i), seed=i) for i in range(5)]
        torch.manual_seed(1)
        first = await answers(engine, requests)
        torch.manual_seed(2)  # the global state does not matter
        second = await answers(engine, requests)
        await engine.close()
        return first, second

    first, second = asyncio.run(main())
    assert first == second


def test_spans_are_where_the_version_of_a_token_changes():
    assert to_weight_spans([4, 4, 4]) == (WeightSpan(4, 0, 3),)
    assert to_weight_spans([4, 5, 5, 7]) == (WeightSpan(4, 0, 1), WeightSpan(5, 1, 3), WeightSpan(7, 3, 4))


def test_cancelled_pause_holds_nothing(tmp_path: Path):
    async def main():
        engine = HFGeneration(str(save_tiny_model(tmp_path, tied=True)))
        running = asyncio.create_task(answers(engine, [request("a", max_new_tokens=200)]))
        await asyncio.sleep(0)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait([pausing])
        result = await asyncio.wait_for(running, 60)
        await engine.close()
        return result

    assert len(asyncio.run(main())["a"].token_ids) == 200


def first_logprob(model: Path) -> float:
    async def main() -> float:
        engine = HFGeneration(str(model), dtype="bfloat16")
        result = (await answers(engine, [request("a", tokens=range(3, 9), max_new_tokens=1)]))["a"]
        await engine.close()
        return result.logprobs[0]

    return asyncio.run(main())


def test_logits_of_bfloat16_are_kept_in_float32_where_the_policy_has_them_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save_tiny_model(tmp_path, tied=True)
    layers: list[torch.nn.Linear] = []
    keep = hf.keep_float32_logits
    monkeypatch.setattr(hf, "keep_float32_logits", lambda m: (keep(m), layers.append(m.get_output_embeddings())))
    exact = first_logprob(path)
    monkeypatch.setattr(hf, "keep_float32_logits", lambda model: None)
    assert first_logprob(path) != exact
    hidden = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = layers[0](hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ layers[0].weight.double().T, atol=1e-5, rtol=0)


def test_residual_stream_of_bfloat16_is_summed_in_float32(tmp_path: Path) -> None:
    """As the policy's is."""
    types: set[torch.dtype] = set()

    async def main() -> None:
        engine = HFGeneration(str(save_tiny_model(tmp_path, tied=True)), dtype="bfloat16")
        for layer in engine._model.model.layers:
            layer.register_forward_hook(lambda layer, inputs, output: types.add(output.dtype))
        await answers(engine, [request("a", tokens=range(3, 9), max_new_tokens=3)])
        await engine.close()

    asyncio.run(main())
    assert types == {torch.float32}
