"""What an OpenAI-compatible server owes the official client: one suite for the gateway and for `nemo-rl serve`."""

import asyncio
import math
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

MAX_TOKENS = 8
MALFORMED: tuple[dict[str, Any], ...] = (
    {"messages": "hi"},
    {"messages": [{"content": "x"}]},
    {"max_tokens": 0},
    {"tools": [{"type": "function"}]},
)


async def run_suite(client: AsyncOpenAI, model: str, question: str) -> None:
    """Ask a greedy model of at least two different characters; raise AssertionError for what the client is owed."""
    messages: list[Any] = [{"role": "user", "content": question}]

    async def ask(**fields: Any) -> ChatCompletion:
        chosen = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0.0, **fields}
        return await client.chat.completions.create(model=model, **chosen)

    assert model in [each.id for each in (await client.models.list()).data]
    whole = await ask()
    text = check_whole(whole)
    await check_stream(client, model, messages, whole)
    cut = await ask(max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 2
    assert text.startswith(cut.choices[0].message.content or "")
    stop = next(letter for index, letter in enumerate(text) if index and text.index(letter) == index)
    stopped = (await ask(stop=[stop])).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    check_log_probs(await ask(logprobs=True), text)
    await check_turns(ask, messages, text)
    for fields in MALFORMED:
        with pytest.raises(openai.BadRequestError):
            await ask(**fields)
    assert check_whole(await ask()) == text  # after the errors, too


def check_whole(reply: ChatCompletion) -> str:
    """Return the text of a whole response, whose tokens add up."""
    (choice,), usage = reply.choices, reply.usage
    assert (reply.object, choice.message.role) == ("chat.completion", "assistant")
    assert choice.finish_reason in ("stop", "length")
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= MAX_TOKENS
    assert choice.message.content
    return choice.message.content


async def check_stream(client: AsyncOpenAI, model: str, messages: list[Any], whole: ChatCompletion) -> None:
    """The deltas of a stream are the whole response, and its last chunk has the same usage."""
    stream = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0.0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def check_log_probs(reply: ChatCompletion, text: str) -> None:
    """Each token of the response has a log-probability; the tokens are its text."""
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert reply.usage is not None
    assert len(found.content) == reply.usage.completion_tokens
    assert all(math.isfinite(each.logprob) and each.logprob <= 0 for each in found.content)
    assert "".join(each.token for each in found.content).startswith(text)


async def check_turns(ask: Any, messages: list[Any], text: str) -> None:
    """A longer history has more prompt tokens, also when two calls are made at once."""
    longer = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
    first, second = await asyncio.gather(ask(), ask(messages=longer))
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + len(text.split())
    assert check_whole(first) == text
