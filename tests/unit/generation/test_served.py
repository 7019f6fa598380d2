"""A server of OpenAI's API as an engine: what it is sent, what is read of its answers, and what is a failure."""

import asyncio
import math
import re
from typing import Any

import pytest
from aiohttp import web

from nemo_rl.config.policy import EndpointLimitsConfig, ServedModelConfig
from nemo_rl.distributed.endpoint import Endpoint
from nemo_rl.errors import GenerationError
from nemo_rl.generation.served import Api, ServedGeneration, chat_body, chat_completion, completion_body
from nemo_rl.types import UNKNOWN_TOKEN, Completion, FailedRequest, GenerationRequest, Message, SamplingParams, ToolCall
from tests.fakes.scoring_server import Answer, scoring_server

SAMPLING = SamplingParams(max_new_tokens=5, temperature=0.7, top_p=0.9, stop_token_ids=(2,))


def request(name: str = "r", **changes: Any) -> GenerationRequest:
    given: dict[str, Any] = {"token_ids": (5, 6), "sampling": SAMPLING, "seed": 2**63 + 3, "session_id": name}
    return GenerationRequest(name, **(given | changes))


def chat_request(**changes: Any) -> GenerationRequest:
    return request(**{"token_ids": (), "messages": (Message("user", "What?"),), **changes})


def answered(answer: Answer, requests: list[GenerationRequest], api: Api = "completions") -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with scoring_server(answer) as url:
            limits = EndpointLimitsConfig(max_retries=1, retry_backoff_s=0)
            endpoint = Endpoint("server", ServedModelConfig(base_urls=[url], model="m", limits=limits))
            generation = ServedGeneration(endpoint, model="m", api=api)
            try:
                return {result.request_id: result async for result in generation.generate(requests)}
            finally:
                await generation.close()

    return asyncio.run(main())


def always(body: dict[str, Any], status: int = 200) -> Answer:
    async def answer(path: str, asked: dict[str, Any]) -> web.Response:
        return web.json_response(body, status=status)

    return answer


def test_completions_are_asked_with_token_ids_a_seed_and_our_stops_alone() -> None:
    body = completion_body(request(), "m")
    assert (body["model"], body["prompt"], body["max_tokens"], body["seed"]) == ("m", [5, 6], 5, 3)
    assert (body["temperature"], body["top_p"], body["stop_token_ids"], body["ignore_eos"]) == (0.7, 0.9, [2], True)
    assert body["return_token_ids"] is True
    assert not {"top_k", "stop"} & body.keys()
    sampling = SamplingParams(5, top_k=4, stop_strings=("\n",))
    assert {"top_k": 4, "stop": ["\n"]}.items() <= completion_body(request(sampling=sampling), "m").items()


def test_tokens_and_log_probs_are_those_that_were_sampled() -> None:
    async def answer(path: str, asked: dict[str, Any]) -> web.Response:
        assert path == "/v1/completions"
        first = asked["prompt"][0]
        choice = {"token_ids": [first, 2], "logprobs": {"token_logprobs": [-0.5, -1.5]}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"total_tokens": 4}})

    results = answered(answer, [request("a", token_ids=(5,)), request("b", token_ids=(8,))])
    assert results["a"] == Completion("a", (5, 2), (-0.5, -1.5), "stop")
    assert results["b"].token_ids == (8, 2)


def test_a_chat_is_asked_with_messages_as_openai_writes_them() -> None:
    call = ToolCall("c1", "add", '{"a": 1}')
    messages = (Message("user", "2?"), Message("assistant", "", (call,)), Message("tool", "2", tool_call_id="c1"))
    tools = ({"type": "function", "function": {"name": "add"}},)
    body = chat_body(chat_request(messages=messages, tools=tools, sampling=SamplingParams(7)), "m", "max_tokens")
    assert body["messages"] == [
        {"role": "user", "content": "2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert (body["max_tokens"], body["tools"]) == (7, list(tools))
    assert body.keys() == {"model", "messages", "temperature", "top_p", "seed", "max_tokens", "tools"}
    assert "max_completion_tokens" in chat_body(chat_request(), "m", "max_completion_tokens")


def test_a_chat_answer_is_text_with_as_many_unknown_tokens_as_the_server_counts() -> None:
    answer = {
        "choices": [{"message": {"content": "four"}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 3, "total_tokens": 9},
    }
    (result,) = answered(always(answer), [chat_request()], "chat").values()
    assert (result.text, result.token_ids, result.finish_reason) == ("four", (UNKNOWN_TOKEN,) * 3, "stop")
    assert all(math.isnan(logprob) for logprob in result.logprobs)


def test_calls_that_a_server_took_out_of_the_text_are_put_back() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    completion = chat_completion(chat_request(), {"choices": [choice]})
    assert completion.text == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("api", "body", "status", "cause"),
    [
        ("completions", {"error": "too long"}, 400, "400 .*too long"),
        ("completions", {"error": "maximum context length is 8"}, 400, "400 .*maximum context length"),
        ("completions", {"error": "busy"}, 503, "503 .*after 2 attempts"),
        ("completions", {"choices": []}, 200, "gave no choice"),
        ("completions", {"choices": [{"text": "x", "finish_reason": "stop"}]}, 200, "gave no token_ids"),
        ("completions", {"choices": [{"token_ids": [1], "finish_reason": "stop"}]}, 200, "without a log-prob each"),
        ("chat", {"choices": [{"message": {}, "finish_reason": "content_filter"}]}, 200, "content_filter"),
    ],
)
def test_what_a_server_refuses_or_garbles_fails_its_request_with_the_cause(
    api: Api, body: dict[str, Any], status: int, cause: str
) -> None:
    asked = chat_request() if api == "chat" else request()
    (result,) = answered(always(body, status), [asked], api).values()
    assert isinstance(result, FailedRequest)
    assert re.search(cause, result.cause), result.cause
    assert result.is_too_long == ("context length" in cause)


def test_a_servers_weights_are_its_own() -> None:
    async def main() -> None:
        endpoint = Endpoint("server", ServedModelConfig(base_urls=["http://127.0.0.1:1"], model="m"))
        with pytest.raises(GenerationError, match="its own"):
            await ServedGeneration(endpoint, model="m", api="chat").update_weights(None, 1)  # pyright: ignore

    asyncio.run(main())
