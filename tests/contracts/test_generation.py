"""Every engine answers requests alike."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from nemo_rl.generation.requests import answer_by_deadline, generate_by_deadline
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.policy.truncation import Truncation, kept_tokens
from nemo_rl.testing import ENGINE_CLAIMS
from nemo_rl.token_columns import SAMPLING_MASK
from nemo_rl.types import Completion, FailedRequest
from tests.contracts.engines import MAX_MODEL_LEN, VOCAB_SIZE, answers, exact_logprobs, request, tiny_model
from tests.contracts.test_weight_sync import published

PROMPTS = [(5, 6, 7), (100,), tuple(range(40, 90)), (5, 6, 8), (299, 0, 1), (7, 7, 7, 7, 7)]


@pytest.fixture(params=["hf", "vllm", "vllm in process"])
def engine(request: pytest.FixtureRequest, engines: Any, engine_loop: asyncio.Runner) -> Any:
    """Each test starts from the model's own weights."""
    engine = engines(request.param, "tied")
    published(engine_loop, engine, tiny_model(tied=True), weight_version=0)
    return engine


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return tiny_model(tied=True)


@pytest.mark.parametrize("claim", ENGINE_CLAIMS)
def test_contract_of_engines_holds(engine_loop, engine, model, claim):
    engine_loop.run(claim(engine, model, 1e-4))


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, None), (1.0, 7), (0.9, 20)])
def test_logprobs_are_those_of_the_trainers_truncated_distribution(engine_loop, engine, model, top_p, top_k):
    requests = [
        request(str(i), tokens=prompt, seed=i, temperature=0.7, top_p=top_p, top_k=top_k or -1, max_new_tokens=20)
        for i, prompt in enumerate(PROMPTS)
    ]
    results = engine_loop.run(answers(engine, requests))
    for asked in requests:
        completion = results[asked.request_id]
        exact = exact_logprobs(model, asked.token_ids, completion.token_ids, 0.7, Truncation(top_p, top_k))
        torch.testing.assert_close(torch.tensor(completion.logprobs), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, None), (1.0, 7), (0.9, 20)])
def test_recorded_sets_are_those_that_tokens_were_drawn_from(engine_loop, engine, model, top_p, top_k):
    """Each log-prob is that of the recorded set alone, which is the model's own where nothing is at the edge."""
    sampling = {"temperature": 0.7, "top_p": top_p, "top_k": top_k or -1, "max_new_tokens": 20}
    requests = [
        request(str(i), tokens=prompt, seed=i, return_sampling_mask=True, **sampling)
        for i, prompt in enumerate(PROMPTS)
    ]
    plain = replace(requests[0], sampling=replace(requests[0].sampling, return_sampling_mask=False), request_id="plain")
    results = engine_loop.run(answers(engine, [*requests, plain]))
    assert not results["plain"].columns
    assert results["plain"].token_ids == results["0"].token_ids
    for asked in requests:
        completion, length = results[asked.request_id], len(asked.token_ids)
        sets = completion.columns[SAMPLING_MASK]
        assert (sets[:length] == -1).all()
        with torch.no_grad():
            logits = model(torch.tensor([[*asked.token_ids, *completion.token_ids]])).logits[0, length - 1 : -1] / 0.7
        own = kept_tokens(logits, top_p=top_p, top_k=top_k)
        for token, logprob, row, scores, kept in zip(
            completion.token_ids, completion.logprobs, sets[length:], logits, own, strict=True
        ):
            ids = torch.from_numpy(row[row >= 0]).long()
            assert sorted(ids.tolist()) == kept.nonzero()[:, 0].tolist()
            assert token in ids
            exact = scores[token] - scores[ids].logsumexp(0)
            assert logprob == pytest.approx(float(exact), abs=1e-4)


def test_top_k_samples_among_the_best_and_renormalises(engine_loop, engine):
    best = engine_loop.run(answers(engine, [request("a", top_k=1, max_new_tokens=4)]))["a"]
    greedy = engine_loop.run(answers(engine, [request("a", temperature=0.0, max_new_tokens=4)]))["a"]
    assert best.token_ids == greedy.token_ids
    assert best.logprobs == pytest.approx([0.0] * 4, abs=1e-6)


def test_other_seeds_give_other_samples(engine_loop, engine):
    results = engine_loop.run(answers(engine, [request(str(i), seed=i) for i in range(4)]))
    assert len({result.token_ids for result in results.values()}) == 4


def test_seeds_beyond_63_bits_and_below_zero_are_taken(engine_loop, engine):
    results = engine_loop.run(answers(engine, [request("big", seed=2**64 - 1), request("negative", seed=-3)]))
    assert all(isinstance(result, Completion) for result in results.values())


def test_completion_ends_where_the_model_has_no_room(engine_loop, engine):
    prompt = [9] * (MAX_MODEL_LEN - 3)
    completion = engine_loop.run(answers(engine, [request("a", tokens=prompt)]))["a"]
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": [9] * (MAX_MODEL_LEN + 1)},
        {"tokens": []},
        {"tokens": [VOCAB_SIZE + 100]},
        {"max_new_tokens": 0},
    ],
    ids=["too long", "empty", "no such token", "nothing to sample"],
)
def test_impossible_request_fails_alone(engine_loop, engine, bad):
    results = engine_loop.run(answers(engine, [request("bad", **bad), request("good")]))
    assert isinstance(results["bad"], FailedRequest)
    assert results["bad"].cause
    assert results["bad"].is_too_long == (len(bad.get("tokens", ())) > MAX_MODEL_LEN)
    assert isinstance(results["good"], Completion)


def test_closed_iterator_frees_the_engine(engine_loop, engine):
    async def main():
        requests = [request(str(i), max_new_tokens=4 if i == 0 else 480, seed=i) for i in range(8)]
        results = engine.generate(requests)
        first = await anext(results)
        await results.aclose()
        return first, await answers(engine, [request("next")])

    first, after = engine_loop.run(main())
    assert isinstance(first, Completion)
    assert isinstance(after["next"], Completion)
    if isinstance(engine, VllmGeneration):
        assert engine._engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("num_requests", [1, 3])
def test_cancelled_caller_frees_the_engine(engine_loop, engine, num_requests):
    async def main():
        requests = [request(str(i), max_new_tokens=500) for i in range(num_requests)]
        waiting = asyncio.create_task(answers(engine, requests))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        return await answers(engine, [request("next")])

    assert isinstance(engine_loop.run(main())["next"], Completion)
    if isinstance(engine, VllmGeneration):
        assert engine._engine.get_num_unfinished_requests() == 0


def test_calls_that_overlap_are_all_answered(engine_loop, engine):
    async def main():
        return await asyncio.gather(*(answers(engine, [request(str(i), seed=i)]) for i in range(6)))

    together = engine_loop.run(main())
    alone = engine_loop.run(answers(engine, [request("3", seed=3)]))
    assert together[3]["3"].token_ids == alone["3"].token_ids


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a call"])
@pytest.mark.parametrize("kind", ["vllm", "vllm in process"])
def test_request_without_an_answer_fails_at_its_deadline(engine_loop, engines, kind, alone):
    engine = engines(kind, "tied")

    async def main():
        await engine._engine.pause_generation(mode="keep")
        late = replace(request("late"), timeout_s=0.05)
        try:
            if alone:
                return [await answer_by_deadline(engine, late)]
            return [result async for result in generate_by_deadline(engine, [late])]
        finally:
            await engine._engine.resume_generation()

    assert engine_loop.run(main()) == [FailedRequest("late", "no result in 0.05 s", timed_out=True)]
    assert engine._engine.get_num_unfinished_requests() == 0
