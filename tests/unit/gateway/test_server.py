"""The server as the official OpenAI client and a plain HTTP client see it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import ClientError, ClientSession, web
from openai import AsyncOpenAI

from nemo_rl.errors import ConfigError
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.server import GatewayServer, ServerSettings
from nemo_rl.types import GenerationRequest
from tests.fakes.generation import FakeGeneration
from tests.openai_suite import run_suite
from tests.unit.gateway.engines import CALL_TEXT, DEADLINE_S, TOOL, SpeakingGeneration, started, text_of, tokens_of

HI: Any = {"role": "user", "content": "hi"}
TOOLS: Any = [TOOL]


def speak(request: GenerationRequest, prompt: str) -> str:
    """Thinks and calls the tool, then tells its result, then says goodbye."""
    if "<tool_response>" not in prompt:
        return f"<think>add them</think>\n\n{CALL_TEXT}"
    return "It is 7." if "thanks" not in prompt else "Bye"


def serve(
    generation: FakeGeneration,
    use: Callable[[GatewayServer], Awaitable[None]],
    name: str = "qwen3",
    settings: ServerSettings | None = None,
    **changes: Any,
) -> None:
    """Run `use` against a server."""

    async def main() -> None:
        server = await started(generation, name, settings, **changes)
        try:
            await asyncio.wait_for(use(server), DEADLINE_S)
        finally:
            await server.close()

    asyncio.run(main())


def client_of(base_url: str, key: str = "unused") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=DEADLINE_S)


async def call_of(
    server: GatewayServer, method: str, path: str, *, key: str | None = None, **fields: Any
) -> tuple[int, Any]:
    """Call with the run's key, or another one."""
    headers = {"Authorization": f"Bearer {server.token if key is None else key}"}
    async with (
        ClientSession(server.base_url, headers=headers) as client,
        client.request(method, path, **fields) as response,
    ):
        return response.status, await response.json()


async def eventually(claim: Callable[[], bool]) -> None:
    """Returns once the claim holds; the test's deadline is the limit."""
    while not claim():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_three_turns_with_a_tool_train_on_exactly_what_was_sampled():
    async def use(server: GatewayServer) -> None:
        opened = (await call_of(server, "POST", "/sessions", json={"seed": 5}))[1]
        messages: list[Any] = [HI]
        completion_tokens = 0
        async with client_of(opened["base_url"]) as client:
            for follow_up in (None, {"role": "user", "content": "thanks"}, None):
                done = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                completion_tokens += done.usage.completion_tokens if done.usage else 0
                said = done.choices[0].message
                messages.append(said.model_dump())
                for tool_call in said.tool_calls or ():
                    assert done.choices[0].finish_reason == "tool_calls"
                    assert (tool_call.function.name, tool_call.function.arguments) == ("add", '{"a": 3, "b": 4}')  # type: ignore
                    messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": "7"})
                if follow_up:
                    messages.append(follow_up)
        assert messages[1]["reasoning_content"] == "add them"
        assert [m["content"] for m in messages if m["role"] == "assistant"] == [None, "It is 7.", "Bye"]
        await call_of(server, "POST", f"/sessions/{opened['id']}/reward", json={"reward": 1})
        status, session = await call_of(server, "DELETE", f"/sessions/{opened['id']}")
        (chain,) = session["chains"]
        assert (status, session["rewards"], session["num_calls"]) == (200, {"reward": 1.0}, 3)
        assert sum(chain["token_mask"]) == completion_tokens
        sampled = [i for i, mask in zip(chain["token_ids"], chain["token_mask"], strict=True) if mask]
        texts = [f"<think>add them</think>\n\n{CALL_TEXT}", "It is 7.", "Bye"]
        assert sampled == [i for text in texts for i in tokens_of("qwen3", text)]
        assert chain["generation_logprobs"] == [-0.25 * mask for mask in chain["token_mask"]]
        assert chain["weight_versions"] == [3, 4]
        assert server.num_sessions == 0

    serve(SpeakingGeneration("qwen3", speak), use)


def test_streams_carry_the_same_message_as_whole_responses():
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            stream = await client.chat.completions.create(
                model="policy", messages=[HI], tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            whole = await client.chat.completions.create(model="policy", messages=[HI], tools=TOOLS)
        calls = [each for chunk in chunks[:-1] for each in chunk.choices[0].delta.tool_calls or ()]
        assert [each.index for each in calls] == [0, 0]
        functions = [each.function for each in calls if each.function is not None]
        assert [each.name for each in functions] == ["add", None]
        assert "".join(each.arguments or "" for each in functions) == '{"a": 3, "b": 4}'
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage == whole.usage is not None
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}

    serve(SpeakingGeneration("qwen3", speak), use)


def test_log_probs_stop_strings_and_limits_reach_the_client():
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            done = await client.chat.completions.create(model="policy", messages=[HI], logprobs=True, stop=["B"])
            short = await client.chat.completions.create(model="policy", messages=[HI], max_tokens=2)
        choice = done.choices[0]
        assert choice.message.content == "A"
        assert choice.logprobs is not None
        assert [(each.token, each.logprob) for each in choice.logprobs.content or ()] == [
            *[(letter, -0.25) for letter in "ABC"],
            ("", -0.25),  # the stop token
        ]
        assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("AB", "length")

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ABC"), use)


def test_without_a_session_the_echoed_tokens_tell_the_chain():
    async def use(server: GatewayServer) -> None:
        messages: list[Any] = [HI]
        seen: list[int] = []
        async with client_of(f"{server.base_url}/v1", server.token) as client:
            for _ in range(3):
                said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
                extra: Any = said.model_extra
                assert extra["prompt_token_ids"][: len(seen)] == seen
                assert extra["generation_log_probs"] == [-0.25] * len(extra["generation_token_ids"])
                seen = extra["prompt_token_ids"] + extra["generation_token_ids"]
                messages += [said.model_dump(), {"role": "user", "content": "more"}]
            assert text_of("qwen3", seen).count("<think>never shown again</think>") == 3
            messages[-2]["generation_token_ids"][0] += 1
            with pytest.raises(openai.ConflictError, match="the tokens were changed"):
                await client.chat.completions.create(model="policy", messages=messages)

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "<think>never shown again</think>\n\n4"), use)


def test_the_suite_of_the_official_client_passes():
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            await run_suite(client, "policy", "hi")

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ABCD"), use)


def test_models_and_health_are_told():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        for base_url in (f"{server.base_url}/v1", server.session_url(session_id)):
            async with client_of(base_url) as client:
                assert [model.id for model in (await client.models.list()).data] == ["policy"]
        counts = {"sessions": 1, "calls": 0, "waiting": 0}
        assert await call_of(server, "GET", "/health") == (200, {"status": "ok"} | counts)

    serve(FakeGeneration(), use)


UNSUPPORTED: list[dict[str, Any]] = [
    {"n": 2},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    {"top_logprobs": 3},
    {"response_format": {"type": "json_object"}},
    {"modalities": ["audio"]},
    {"logit_bias": {"1": 5}},
    {"functions": [{"name": "f"}]},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
]
MALFORMED: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"role": "function", "content": "x"}]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
    {"max_tokens": 0},
    {"max_tokens": "10"},
    {"stream": "yes"},
    {"stop": [""]},
    {"stop": ["a"] * 17},
    {"tools": [{"type": "function"}]},
    {"messages": [HI, {"role": "assistant", "prompt_token_ids": [2**40], "generation_token_ids": [1]}, HI]},
]


@pytest.mark.parametrize("prefix", ["", "session"])
def test_requests_that_cannot_be_served_are_400_and_name_the_field(prefix):
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1" if prefix else "/v1"
        for fields in (*UNSUPPORTED, *(MALFORMED if not prefix else MALFORMED[:-1])):
            status, body = await call_of(server, "POST", f"{path}/chat/completions", json={"messages": [HI], **fields})
            assert (status, body["error"]["type"]) == (400, "invalid_request_error"), fields
            assert body["error"]["param"].startswith(next(iter(fields))), fields
            assert body["error"]["message"]

    serve(FakeGeneration(), use)


def test_the_clients_errors_are_those_of_openais_server():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        closed = server.open_session()
        server.close_session(closed)
        unknown = f"{server.base_url}/sessions/unknown/v1"
        cases: list[tuple[str, type[openai.APIStatusError], str, dict[str, Any]]] = [
            (server.session_url(session_id), openai.BadRequestError, "unsupported", {"n": 2}),
            (unknown, openai.NotFoundError, "session_not_found", {}),
            (server.session_url(closed), openai.ConflictError, "session_closed", {}),
            (server.session_url(session_id), openai.InternalServerError, "engine_failed", {}),
        ]
        for base_url, error_type, code, fields in cases:
            async with client_of(base_url) as client:
                with pytest.raises(error_type) as error:
                    await client.chat.completions.create(model="policy", messages=[HI], **fields)
                assert error.value.code == code
        assert (await call_of(server, "GET", f"/sessions/{session_id}"))[1]["num_calls"] == 0

    serve(SpeakingGeneration("qwen3", lambda request, prompt: None), use)


def test_a_server_that_is_full_is_429():
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            with pytest.raises(openai.RateLimitError) as error:
                await client.chat.completions.create(model="policy", messages=[HI])
            assert error.value.response.headers["Retry-After"] == "1"
        assert (await call_of(server, "POST", "/sessions"))[0] == 200
        status, body = await call_of(server, "POST", "/sessions")
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "rate_limit_error", "too_many_sessions")
        with pytest.raises(RequestError, match="1 sessions are open"):
            server.open_session()

    settings = ServerSettings(max_sessions=1, max_client_sessions=1)
    serve(FakeGeneration(), use, settings=settings, max_concurrent_calls=0)


def test_a_fault_of_our_own_is_500_without_its_text(caplog):
    class Faulty(FakeGeneration):
        async def generate(self, requests):
            yield object()  # type: ignore[misc]

    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1/chat/completions"
        status, body = await call_of(server, "POST", path, json={"messages": [HI]})
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "token_ids" not in body["error"]["message"]

    serve(Faulty(), use)
    assert "has no attribute 'token_ids'" in caplog.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nul", b'{"reward": true}', b'{"reward": "1"}', b'{"reward": 1e999}', b"{}", b"\xff"]
)
def test_rewards_are_finite_numbers(body):
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        status, error = await call_of(server, "POST", f"/sessions/{session_id}/reward", data=body)
        assert (status, error["error"]["type"]) == (400, "invalid_request_error")
        assert (await call_of(server, "GET", f"/sessions/{session_id}"))[1]["rewards"] == {}

    serve(FakeGeneration(), use)


def test_rewards_come_by_uni_agents_name_too():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        path = f"/sessions/{session_id}/reward_info"
        assert (await call_of(server, "POST", path, json={"reward_info": {"score": 1, "format": 0.5}}))[0] == 200
        status, body = await call_of(server, "POST", path, json={"reward_info": {"label": "right"}})
        assert (status, body["error"]["param"]) == (400, "reward_info.label")
        assert (await call_of(server, "POST", path, json={"reward_info": {}, "reward": 1}))[0] == 400
        assert (await call_of(server, "POST", path, json={"reward_info": {"score": 0}}, key=session_id))[0] == 401
        assert (await call_of(server, "GET", f"/sessions/{session_id}"))[1]["rewards"] == {"score": 1.0, "format": 0.5}

    serve(FakeGeneration(), use)


def test_rewards_go_to_the_run_or_to_one_call():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        async with client_of(server.session_url(session_id)) as client:
            done = await client.chat.completions.create(model="policy", messages=[HI])
        path = f"/sessions/{session_id}/reward"
        assert (await call_of(server, "POST", path, json={"rewards": {"a": 1, "b": -0.5}}))[0] == 200
        assert (await call_of(server, "POST", path, json={"reward": 2, "completion_id": done.id}))[0] == 200
        assert (await call_of(server, "POST", path, json={"reward": 2, "completion_id": "other"}))[0] == 404
        session = (await call_of(server, "GET", f"/sessions/{session_id}"))[1]
        assert session["rewards"] == {"a": 1.0, "b": -0.5}
        assert [chain["rewards"] for chain in session["chains"]] == [{"reward": 2.0}]

    serve(FakeGeneration(), use)


async def never(request: GenerationRequest) -> None:
    await asyncio.Event().wait()


def test_a_client_that_goes_away_cancels_its_generation_and_leaves_no_trace():
    generation = SpeakingGeneration("qwen3", speak, before=never)

    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        for path in (f"/sessions/{session_id}/v1/chat/completions", "/v1/chat/completions"):
            task = asyncio.create_task(call_of(server, "POST", path, json={"messages": [HI]}))
            asked = len(generation.requests)
            await eventually(lambda asked=asked: len(generation.requests) > asked)
            task.cancel()
            await eventually(lambda asked=asked: generation.num_cancelled > asked)
        assert (await call_of(server, "GET", "/health"))[1]["calls"] == 0
        assert (await call_of(server, "GET", f"/sessions/{session_id}"))[1]["num_calls"] == 0

    serve(generation, use)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_is_gone_when_it_is_sent_is_not_trained(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        path = f"/sessions/{session_id}/v1/chat/completions"

        def cut(self: Any, *arguments: Any) -> Any:
            assert server._runner is not None
            assert server._runner.server is not None
            for connection in server._runner.server.connections:
                assert connection.transport is not None
                connection.transport.abort()
            return b"" if stream else {}

        with monkeypatch.context() as patched:
            if stream:
                patched.setattr("nemo_rl.gateway.dialects.chat_completions.ChunkStream.render_end", cut)
            else:
                patched.setattr("nemo_rl.gateway.dialects.chat_completions.ChatCompletions.render", cut)
            with pytest.raises((ClientError, ConnectionError)):
                await call_of(server, "POST", path, json={"messages": [HI], "stream": stream})
        live = server._sessions.get(session_id)
        assert live.session.num_calls == 1
        await eventually(lambda: live.session.chains() == ())
        await call_of(server, "POST", path, json={"messages": [HI]})
        assert len(live.session.chains()) == 1

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ABC"), use)


def test_closing_a_session_ends_its_calls_with_409():
    generation = SpeakingGeneration("qwen3", speak, before=never)

    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        path = f"/sessions/{session_id}"
        task = asyncio.create_task(call_of(server, "POST", f"{path}/v1/chat/completions", json={"messages": [HI]}))
        await eventually(lambda: len(generation.requests) == 1)
        assert (await call_of(server, "DELETE", path))[0] == 200
        status, body = await task
        assert (status, body["error"]["code"]) == (409, "session_closed")
        assert generation.num_cancelled == 1
        for method in ("GET", "DELETE"):
            assert (await call_of(server, method, path))[0] == 409

    serve(generation, use)


def test_unused_sessions_are_closed():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        await eventually(lambda: server.num_sessions == 0)
        assert (await call_of(server, "GET", f"/sessions/{session_id}"))[0] == 409

    serve(FakeGeneration(), use, settings=ServerSettings(ttl_s=0.01))


def test_bound_to_all_addresses_the_server_wants_its_token():
    async def use(server: GatewayServer) -> None:
        assert server.token
        assert server.base_url.startswith("http://127.0.0.1:")
        session_id = server.open_session()
        async with client_of(server.session_url(session_id), "guessed") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="policy", messages=[HI])
        for key in (server.token, session_id):
            async with client_of(server.session_url(session_id), key) as client:
                assert await client.chat.completions.create(model="policy", messages=[HI])
        assert (await call_of(server, "POST", "/sessions", key=""))[0] == 401
        assert (await call_of(server, "GET", "/health"))[0] == 200

    serve(FakeGeneration(), use, settings=ServerSettings(host="0.0.0.0", advertised_host="127.0.0.1"))


def test_a_sessions_key_opens_its_calls_and_nothing_else():
    async def use(server: GatewayServer) -> None:
        own, other = server.open_session(), server.open_session()
        call = f"/sessions/{own}/v1/chat/completions", {"messages": [HI]}
        for key in ("", "guessed", own):
            assert (await call_of(server, "POST", call[0], key=key, json=call[1]))[0] == 200
        owner_only = [("POST", "/sessions", None)]
        for session_id in (own, other):
            path = f"/sessions/{session_id}"
            owner_only += [("GET", path, None), ("DELETE", path, None), ("POST", f"{path}/reward", {"reward": 1})]
        for method, path, body in owner_only:
            for key in ("", "guessed", own):
                status, answer = await call_of(server, method, path, key=key, json=body)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), (method, path)
        for path in ("/v1/chat/completions", "/v1/messages/count_tokens"):
            body = {"messages": [HI], "model": "m", "max_tokens": 1}
            assert (await call_of(server, "POST", path, key="guessed", json=body))[0] == 401
            assert (await call_of(server, "POST", path, key=own, json=body))[0] == 200
        assert server.num_sessions == 2
        assert server.close_session(other).num_calls == 0
        assert server.close_session(own).rewards == {}

    serve(FakeGeneration(), use)


def test_a_server_can_be_closed_twice():
    async def use(server: GatewayServer) -> None:
        await server.close()
        await server.close()

    serve(FakeGeneration(), use)


def test_an_address_in_use_is_told():
    async def use(server: GatewayServer) -> None:
        with pytest.raises(ConfigError, match=r"^gateway.host, gateway.port = .* in use"):
            await started(FakeGeneration(), "qwen3", ServerSettings(port=server.port))

    serve(FakeGeneration(), use)


def test_deltas_that_wait_share_a_write() -> None:
    writes: list[bytes] = []
    has_written = asyncio.Event()
    write = web.StreamResponse.write

    async def record(self: web.StreamResponse, data: bytes) -> None:
        writes.append(data)
        has_written.set()
        await write(self, data)

    async def between_tokens(request: GenerationRequest) -> None:
        await has_written.wait()  # the second token comes after the first text is written

    async def use(server: GatewayServer) -> None:
        body = {"messages": [HI], "stream": True}
        path = f"/sessions/{server.open_session()}/v1/chat/completions"
        async with ClientSession(server.base_url) as client, client.post(path, json=body) as response:
            events = (await response.read()).split(b"\n\n")
        assert [json.loads(event[6:])["choices"][0]["delta"] for event in events[:2]] == [
            {"role": "assistant", "content": ""},
            {"content": "a"},
        ]
        assert events[-2:] == [b"data: [DONE]", b""]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web.StreamResponse, "write", record)
        serve(SpeakingGeneration("chatml", lambda request, text: "ab", between_tokens=between_tokens), use)
    assert writes[0].count(b"data: ") == 2  # the start and the first text
