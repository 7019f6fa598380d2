"""The gateway before real vLLM: what an OpenAI client made it sample is what a policy computes, token for token."""

import asyncio
import json
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.gateway import markup, streaming
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.manager import FinishedSession, GatewayManager, SessionHandle
from nemo_rl.types import SamplingParams
from tests.contracts.engines import MAX_MODEL_LEN, exact_logprobs, tiny_model
from tests.contracts.test_weight_sync import published
from tests.templates import byte_tokenizer

TEMPERATURE = 0.7
WEIGHT_VERSION = 6
DEADLINE_S = 200.0
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def parse_anything(text: str) -> tuple[str, tuple[markup.ParsedCall, ...]]:
    """Reads every response as a tool call: a model of random weights writes none of its own."""
    return "", (markup.ParsedCall("look_up", json.dumps({"text": text})),)


@pytest.fixture
def engine(engines: Any, engine_loop: asyncio.Runner) -> Any:
    """vLLM with the weights that the log-probs are compared with, whatever earlier tests left in it."""
    engine = engines("vllm", "tied")
    published(engine_loop, engine, tiny_model(tied=True), weight_version=WEIGHT_VERSION)
    return engine


@pytest.fixture
def parse_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(markup.CALL_MARKUP, "anything", markup.CallMarkup(parse_anything))  # type: ignore[arg-type]


async def manager_of(engine: Any) -> GatewayManager:
    encoder = ChatEncoder(byte_tokenizer("chatml"))
    sampling = SamplingParams(40, temperature=TEMPERATURE, stop_token_ids=encoder.stop_token_ids)
    rules = CompletionRules("policy", MAX_MODEL_LEN, sampling, seed=1, max_concurrent_calls=16, timeout_s=DEADLINE_S)
    return await GatewayManager.start(engine, Codec(encoder, tool_parser_name="anything"), rules, GatewayConfig())


async def three_turns(handle: SessionHandle) -> list[Any]:
    """A tool call and its answer, a text and a user's next question, and another call; the completions."""
    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    completions = []
    async with AsyncOpenAI(
        base_url=handle.base_url, api_key=handle.api_key, max_retries=0, timeout=DEADLINE_S
    ) as client:
        for tool_choice in ("auto", "none", "auto"):
            done: Any = await client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=TOOLS,
                tool_choice=tool_choice,
                extra_body={"return_token_ids": True},
            )
            completions.append(done)
            said = done.choices[0].message
            messages.append(said.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            for call in said.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "It is here."})
            if not said.tool_calls:
                messages.append({"role": "user", "content": "And then?"})
    return completions


def complete_in_session(runner: asyncio.Runner, engine: Any, **opened: Any) -> tuple[list[Any], FinishedSession]:
    async def main() -> tuple[list[Any], FinishedSession]:
        manager = await manager_of(engine)
        try:
            handle = manager.open_session(**opened)
            completions = await three_turns(handle)
            return completions, await manager.finish(handle)
        finally:
            await manager.close()

    return runner.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.mark.usefixtures("parse_calls")
def test_three_turns_of_an_openai_client_train_on_what_vllm_sampled(engine_loop, engine):
    completions, finished = complete_in_session(engine_loop, engine, seed=5)
    assert [len(done.choices[0].message.tool_calls or ()) for done in completions] == [1, 0, 1]
    (chain,) = finished.chains
    sampled = [message for message in chain.message_log if message.is_generated]
    assert [len(message.token_ids) for message in sampled] == [done.usage.completion_tokens for done in completions]
    assert chain.weight_versions == (WEIGHT_VERSION, WEIGHT_VERSION)
    roles = [message.message.role for message in chain.message_log]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]

    history: tuple[int, ...] = ()
    for done, message in zip(completions, sampled, strict=True):
        told = done.choices[0].message.model_extra
        assert tuple(told["prompt_token_ids"][: len(history)]) == history
        assert done.usage.prompt_tokens == len(told["prompt_token_ids"]) > len(history)
        history = (*told["prompt_token_ids"], *told["generation_token_ids"])
        assert tuple(told["generation_token_ids"]) == message.token_ids
    assert history == flat_token_ids(chain.message_log)

    exact = exact_logprobs(tiny_model(tied=True), history[:1], history[1:], TEMPERATURE)  # one forward of the chain
    exact = torch.cat([torch.zeros(1), exact])
    mask = torch.tensor([message.is_generated for message in chain.message_log for _ in message.token_ids])
    told = torch.tensor([logprob for message in sampled for logprob in message.generation_logprobs or ()])
    torch.testing.assert_close(told, exact[mask], atol=1e-4, rtol=0)


@pytest.mark.usefixtures("parse_calls")
def test_a_greedy_session_beside_sampled_ones_follows_no_seed(engine_loop, engine):
    greedy = SamplingParams(8, temperature=0.0)
    logs = [complete_in_session(engine_loop, engine, seed=seed, sampling=greedy)[1].chains[0] for seed in (1, 2)]
    drawn = [complete_in_session(engine_loop, engine, seed=seed)[1].chains[0] for seed in (1, 2, 1)]
    assert flat_token_ids(logs[0].message_log) == flat_token_ids(logs[1].message_log)
    assert flat_token_ids(drawn[0].message_log) != flat_token_ids(drawn[1].message_log)
    assert flat_token_ids(drawn[0].message_log) == flat_token_ids(drawn[2].message_log)


@pytest.mark.usefixtures("parse_calls")
def test_a_stream_of_vllm_samples_what_the_same_call_samples_without_one(engine_loop, engine, monkeypatch):
    """Deltas come in many events; a session of the same seed without a stream has the same tokens and log-probs."""
    monkeypatch.setattr(streaming, "INTERVAL_S", 0.0)  # each token by itself, however fast they come

    async def main() -> tuple[int, list[FinishedSession]]:
        manager, num_deltas, finished = await manager_of(engine), 0, []
        try:
            for stream in (True, False):
                handle = manager.open_session(seed=5)
                async with AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0) as client:
                    messages: Any = [{"role": "user", "content": "Where is it?"}]
                    done: Any = await client.chat.completions.create(model="m", messages=messages, stream=stream)
                    if stream:
                        num_deltas = len([chunk async for chunk in done if chunk.choices[0].delta.content])
                finished.append(await manager.finish(handle))
        finally:
            await manager.close()
        return num_deltas, finished

    num_deltas, (streamed, whole) = engine_loop.run(asyncio.wait_for(main(), DEADLINE_S))
    assert num_deltas > 5
    for one, other in zip(streamed.chains, whole.chains, strict=True):
        assert flat_token_ids(one.message_log) == flat_token_ids(other.message_log)
        torch.testing.assert_close(
            torch.tensor([p for m in one.message_log for p in m.generation_logprobs or ()]),
            torch.tensor([p for m in other.message_log for p in m.generation_logprobs or ()]),
            atol=1e-5,
            rtol=0,
        )


async def ask_and_answer_by_chat(handle: SessionHandle) -> None:
    messages: list[Any] = [{"role": "user", "content": "Where is it?"}]
    async with AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0) as client:
        for _ in range(2):
            done = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            said = done.choices[0].message
            messages.append(said.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "Here."} for c in said.tool_calls or ()]


async def ask_and_answer_by_gemini(handle: SessionHandle, *, stream: bool) -> None:
    genai: Any = import_module("google.genai")  # typed, nearly all of its fields are optional
    declared = {"name": "look_up", "parameters_json_schema": {"type": "object"}}
    options = genai.types.HttpOptions(base_url=handle.base_url, timeout=int(1000 * DEADLINE_S))
    client = genai.Client(api_key=handle.api_key, http_options=options).aio
    chat = client.chats.create(model="policy", config={"tools": [{"function_declarations": [declared]}]})
    message: Any = "Where is it?"
    for _ in range(2):
        if stream:
            chunks = [chunk async for chunk in await chat.send_message_stream(message)]
        else:
            chunks = [await chat.send_message(message)]
        calls = [call for chunk in chunks for call in chunk.function_calls or ()]
        message = [genai.types.Part.from_function_response(name=c.name, response={"output": "Here."}) for c in calls]
    await client.aclose()


@pytest.mark.usefixtures("parse_calls")
def test_geminis_client_makes_vllm_sample_what_a_client_of_chat_completions_does(engine_loop, engine):
    async def main() -> list[FinishedSession]:
        manager, finished = await manager_of(engine), []
        try:
            for ask in (
                ask_and_answer_by_chat,
                partial(ask_and_answer_by_gemini, stream=False),
                partial(ask_and_answer_by_gemini, stream=True),
            ):
                handle = manager.open_session(seed=5)
                await ask(handle)
                finished.append(await manager.finish(handle))
        finally:
            await manager.close()
        return finished

    by_chat, *others = engine_loop.run(asyncio.wait_for(main(), DEADLINE_S))
    (expected,) = by_chat.chains
    assert [m.message.role for m in expected.message_log] == ["user", "assistant", "tool", "assistant"]
    for other in others:
        (chain,) = other.chains
        assert flat_token_ids(chain.message_log) == flat_token_ids(expected.message_log)
        for one, same in zip(chain.message_log, expected.message_log, strict=True):
            assert one.is_generated == same.is_generated
            drawn, again = (torch.tensor(m.generation_logprobs or ()) for m in (one, same))
            torch.testing.assert_close(drawn, again, atol=1e-5, rtol=0)
