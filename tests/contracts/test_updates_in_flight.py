"""Requests go on through updates of the weights; which tokens are whose is told, and their log-probs are exact."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.data.chat import flat_token_ids
from nemo_rl.gateway import markup
from nemo_rl.gateway.sessions import Chain
from nemo_rl.types import Completion, TokenizedMessage, WeightSpan
from nemo_rl.weight_sync.refit import TransportWeightSync
from tests.contracts.engines import UntrainedPolicy, answers, exact_logprobs, request, tiny_model
from tests.contracts.test_gateway import TEMPERATURE, manager_of, parse_anything, three_turns
from tests.contracts.test_weight_sync import PROBES, published

NUM_TOKENS = 150
NUM_UPDATES = 10
PACE_S = 0.02  # so that the engine, in a process of its own, comes to some tokens between two
NUM_TRIES = 20  # on a busy machine all requests may end before the first update
PROMPT = (5, 6, 7)
MODELS = [tiny_model(tied=True, seed=seed) for seed in (21, 22, 23)]


def model_of(weight_version: int) -> Any:
    return MODELS[weight_version % len(MODELS)]


@pytest.fixture(params=["hf", "vllm", "vllm in process"])
def engine(request: pytest.FixtureRequest, engines: Any, engine_loop: asyncio.Runner) -> Any:
    """It starts with weights 0."""
    engine = engines(request.param, "tied")
    published(engine_loop, engine, model_of(0), weight_version=0)
    return engine


async def sampled_through_updates(engine: Any, *, keep_cache: bool = False) -> list[Completion]:
    """Long completions of requests that ran while weights 1, 2, ... came, at least one of which cut one of them."""
    requests = [request(str(i), tokens=PROMPT, seed=i, max_new_tokens=NUM_TOKENS) for i in range(4)]
    for first in range(1, NUM_TRIES * NUM_UPDATES, NUM_UPDATES):
        running = asyncio.create_task(answers(engine, requests))
        for version in range(first, first + NUM_UPDATES):
            await publish(engine, version, keep_cache=keep_cache)
            await asyncio.sleep(PACE_S)
        completions = list((await running).values())
        if cut_by_updates(completions):
            return completions
    raise AssertionError(f"no update cut a request in {NUM_TRIES} tries")


async def publish(engine: Any, weight_version: int, *, keep_cache: bool = False) -> None:
    sync = TransportWeightSync(PROBES, WeightSyncConfig(), "float32", keep_cache=keep_cache)
    sync._num_verified[engine] = 2  # not verified: the engine without overlapping calls would answer the probes last
    try:
        await sync.publish(UntrainedPolicy(model_of(weight_version)), engine, weight_version=weight_version)  # type: ignore[arg-type]
    finally:
        sync.close()


def error_of(completion: Completion) -> float:
    """How far a log-prob is at most from that of the weights that its token is said to be sampled under."""
    oldest, newest = completion.weight_versions
    spans = completion.weight_spans or (WeightSpan(oldest, 0, len(completion.token_ids)),)
    assert [spans[0].version, spans[-1].version] == [oldest, newest]
    return error_of_spans(PROMPT, completion.token_ids, completion.logprobs, spans, 1.0)


def error_of_spans(
    prompt: Sequence[int],
    sampled: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[WeightSpan],
    temperature: float,
) -> float:
    worst = 0.0
    for span in spans:
        exact = exact_logprobs(model_of(span.version), prompt, sampled[: span.end], temperature)
        worst = max(worst, float((torch.tensor(logprobs[: span.end]) - exact)[span.start :].abs().max()))
    return worst


def cut_by_updates(completions: Sequence[Completion]) -> list[Completion]:
    return [completion for completion in completions if completion.weight_spans]


def test_tokens_on_both_sides_of_an_update_have_the_log_probs_of_their_own_weights(engine_loop, engine):
    completions = engine_loop.run(sampled_through_updates(engine))
    for completion in completions:
        assert len(completion.token_ids) == NUM_TOKENS
        assert error_of(completion) < 1e-4


def test_greedy_outputs_after_each_update_are_those_of_the_new_weights(engine_loop, engine):
    async def main() -> list[Completion]:
        running = asyncio.create_task(answers(engine, [request("long", tokens=PROMPT, max_new_tokens=NUM_TOKENS)]))
        greedy = []
        for version in range(1, NUM_UPDATES + 1):
            await publish(engine, version)
            asked = request(f"greedy-{version}", tokens=PROMPT, temperature=0.0, max_new_tokens=6)
            greedy += (await answers(engine, [asked])).values()
        await running
        return greedy

    for version, completion in enumerate(engine_loop.run(main()), start=1):
        assert completion.weight_versions == (version, version)
        with torch.no_grad():
            logits = model_of(version)(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0]
        best = logits.log_softmax(-1).max(-1).values[len(PROMPT) - 1 : -1]
        torch.testing.assert_close(torch.tensor(completion.logprobs), best, atol=1e-4, rtol=0)


def test_kept_keys_and_values_are_those_of_the_old_weights(engine_loop, engine):
    completions = engine_loop.run(sampled_through_updates(engine, keep_cache=True))
    assert max(error_of(completion) for completion in cut_by_updates(completions)) > 0.1


def test_request_that_no_update_cuts_has_one_version(engine_loop, engine):
    completion = engine_loop.run(answers(engine, [request("a")]))["a"]
    assert (completion.weight_versions, completion.weight_spans) == ((0, 0), ())


def test_pause_without_an_update_changes_nothing(engine_loop, engine):
    async def main() -> tuple[Any, Any]:
        asked = [request("a", max_new_tokens=NUM_TOKENS)]
        alone = await answers(engine, asked)
        running = asyncio.create_task(answers(engine, asked))
        for _ in range(NUM_UPDATES):
            await engine.pause()
            await engine.resume()
            await asyncio.sleep(PACE_S)
        return alone["a"], (await running)["a"]

    alone, paused = engine_loop.run(main())
    assert (paused.token_ids, paused.weight_spans) == (alone.token_ids, ())


def test_turns_of_an_agent_are_exact_while_weights_change(engine_loop, engines, monkeypatch):
    engine = engines("vllm", "tied")
    monkeypatch.setitem(markup.CALL_MARKUP, "anything", markup.CallMarkup(parse_anything))

    async def main() -> Sequence[Chain]:
        manager = await manager_of(engine)
        try:
            handle = manager.open_session(seed=3)
            running = asyncio.create_task(three_turns(handle))
            for version in range(1, NUM_UPDATES + 1):
                await publish(engine, version)
                await asyncio.sleep(PACE_S)
            await running
            return (await manager.finish(handle)).chains
        finally:
            await manager.close()

    published(engine_loop, engine, model_of(0), weight_version=0)
    (chain,) = engine_loop.run(main())
    assert chain.weight_versions[0] < chain.weight_versions[1]
    for index, message in enumerate(chain.message_log):
        if message.is_generated:
            prompt = flat_token_ids(chain.message_log[:index])
            assert error_of_message(message, prompt, chain.weight_versions) < 1e-4


def error_of_message(message: TokenizedMessage, prompt: Sequence[int], versions: tuple[int, int]) -> float:
    """Of a message that no update has cut: under the weights, of those that the chain was sampled under, that fit."""
    sampled, logprobs = message.token_ids, message.generation_logprobs
    assert logprobs is not None
    candidates = (
        [message.weight_spans]
        if message.weight_spans
        else [(WeightSpan(version, 0, len(sampled)),) for version in range(versions[0], versions[1] + 1)[: len(MODELS)]]
    )
    return min(error_of_spans(prompt, sampled, logprobs, spans, TEMPERATURE) for spans in candidates)
