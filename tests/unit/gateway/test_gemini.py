"""Gemini's API: what its official client sends and reads, sessions, schemas, calls without ids."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from aiohttp import ClientSession

from nemo_rl.gateway.dialects.gemini import Gemini, read_openapi_schema
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.server import SESSION_HEADER, GatewayServer, ServerSettings
from nemo_rl.types import TextPart, ThinkingPart, ToolCall, ToolResult
from tests.unit.gateway.engines import ADDRESS, CALL_TEXT, DEADLINE_S, TOOL, SpeakingGeneration, json_bytes, tokens_of
from tests.unit.gateway.test_server import HI, call_of, client_of, serve, speak

genai: Any = import_module("google.genai")  # typed, nearly all of its fields are optional
ASK: Any = {"contents": [{"parts": [{"text": "hi"}]}]}
DECLARED: Any = {"name": "add", "parametersJsonSchema": TOOL["function"]["parameters"]}  # type: ignore[index]
PATH = "models/policy:generateContent"


def called(name: str, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, **fields}}


def returned(name: str, output: Any, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": output, **fields}}


def messages_of(*turns: tuple[str, list[Any]]) -> list[Any]:
    """(role, parts) of the messages that contents are read to."""
    body = {"contents": [{"role": role, "parts": parts} for role, parts in turns]}
    return [(message.role, message.parts) for message in Gemini().parse(json_bytes(body), ADDRESS).messages]


@asynccontextmanager
async def official_client(base_url: str, key: str = "unused") -> AsyncIterator[Any]:
    options = genai.types.HttpOptions(base_url=base_url, timeout=int(1000 * DEADLINE_S))
    client = genai.Client(api_key=key, http_options=options).aio
    try:
        yield client
    finally:
        await client.aclose()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_of_the_official_client_is_one_exact_history(stream: bool) -> None:
    """Its chat sends back every piece of a stream as a content of its own."""

    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        async with official_client(server.session_url(session_id)) as client:
            thinking = {"include_thoughts": True}
            settings: Any = {"tools": [{"function_declarations": [DECLARED]}], "thinking_config": thinking}
            chat = client.chats.create(model="policy", config=settings)

            async def send(message: Any) -> list[Any]:
                sent = [chunk async for chunk in await chat.send_message_stream(message)] if stream else None
                return sent or [await chat.send_message(message)]

            first = await send("hi")
            (call,) = [each for chunk in first for each in chunk.function_calls or ()]
            assert (call.name, call.args) == ("add", {"a": 3, "b": 4})
            thoughts = "".join(p.text for c in first for p in c.candidates[0].content.parts if p.thought)
            assert thoughts == "add them"
            assert first[-1].candidates[0].finish_reason.value == "STOP"
            last = await send(genai.types.Part.from_function_response(name="add", response={"result": 7}))
            assert "".join(chunk.text for chunk in last) == "It is 7."
            assert last[-1].usage_metadata.candidates_token_count == len(tokens_of("qwen3", "It is 7."))
            await send("thanks")
        (chain,) = server.close_session(session_id).chains()
        roles = [message.message.role for message in chain.message_log]
        assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
        whole = tuple(token for message in chain.message_log for token in message.token_ids)
        assert all(whole[: len(request.token_ids)] == request.token_ids for request in generation.requests)

    generation = SpeakingGeneration("qwen3", speak)
    serve(generation, use)


def test_the_official_client_counts_tokens_and_reads_errors():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        async with official_client(server.base_url, session_id) as client:  # the session's id as the API key
            counted = await client.models.count_tokens(model="policy", contents="hi")
            done = await client.models.generate_content(model="policy", contents="hi")
            assert counted.total_tokens == done.usage_metadata.prompt_token_count
            assert (done.model_version, done.text) == ("policy", "ok")
            with pytest.raises(genai.errors.ClientError) as refused:
                await client.models.generate_content(model="policy", contents="hi", config={"candidate_count": 2})
            assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
            assert "candidateCount" in refused.value.message
        async with official_client(f"{server.base_url}/sessions/unknown/v1") as client:
            with pytest.raises(genai.errors.ClientError, match="NOT_FOUND"):
                await client.models.generate_content(model="policy", contents="hi")

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ok"), use)


@pytest.mark.parametrize("version", ["v1", "v1beta"])
def test_an_address_a_header_or_a_key_names_the_session(version: str) -> None:
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        root = f"/{version}/{PATH}"
        named = (
            (f"/sessions/{session_id}/v1/{version}/{PATH}", {}),
            (f"/sessions/{session_id}/{version}/{PATH}", {}),
            (root, {SESSION_HEADER: session_id}),
            (root, {"X-Goog-Api-Key": session_id}),
            (f"{root}?key={session_id}", {}),
        )
        for path, headers in named:
            status, body = await call_of(server, "POST", path, json=ASK, headers=headers)
            assert (status, body["candidates"][0]["content"]["parts"]) == (200, [{"text": "ok"}])
        status, body = await call_of(server, "POST", root, json=ASK)
        assert (status, body["error"]["status"]) == (400, "INVALID_ARGUMENT")
        assert body["error"]["details"][0]["reason"] == "no_session"
        status, body = await call_of(server, "POST", f"/sessions/x/v1/{version}/{PATH}", json=ASK)
        assert (status, body["error"]["code"], body["error"]["status"]) == (404, 404, "NOT_FOUND")
        assert server.close_session(session_id).num_calls == len(named)

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ok"), use)


def test_a_key_in_the_address_is_the_servers_token_where_it_has_one():
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1/{PATH}"
        ask = partial(call_of, server, "POST", json=ASK, key="")
        assert (await ask(path))[1]["error"]["status"] == "UNAUTHENTICATED"
        assert (await ask(f"{path}?key=other"))[0] == 401
        assert (await ask(f"{path}?key=secret"))[0] == 200
        assert (await ask(path, headers={"X-Goog-Api-Key": "secret"}))[0] == 200

    generation = SpeakingGeneration("qwen3", lambda request, prompt: "ok")
    serve(generation, use, settings=ServerSettings(token="secret"))


def test_a_stream_of_anything_but_events_is_refused():
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1beta/models/policy:streamGenerateContent"
        for query in ("", "?alt=json"):
            status, body = await call_of(server, "POST", f"{path}{query}", json=ASK)
            assert (status, body["error"]["details"][0]["fieldViolations"][0]["field"]) == (400, "alt")

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ok"), use)


def test_tokens_are_counted_of_a_whole_request_too():
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1beta/models/policy"
        whole = {**ASK, "systemInstruction": {"parts": [{"text": "Be brief."}]}}
        counted = (await call_of(server, "POST", f"{path}:countTokens", json={"generateContentRequest": whole}))[1]
        done = (await call_of(server, "POST", f"{path}:generateContent", json=whole))[1]
        assert counted == {"totalTokens": done["usageMetadata"]["promptTokenCount"]}
        assert (await call_of(server, "POST", f"{path}:countTokens", json={}))[0] == 400

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ok"), use)


@pytest.mark.parametrize("wanted", [False, True])
def test_thoughts_are_returned_where_they_are_wanted(wanted: bool) -> None:
    async def use(server: GatewayServer) -> None:
        body = {**ASK, "generationConfig": {"thinkingConfig": {"includeThoughts": wanted}}}
        path = f"/sessions/{server.open_session()}/v1beta/{PATH}"
        parts = (await call_of(server, "POST", path, json=body))[1]["candidates"][0]["content"]["parts"]
        assert [part["text"] for part in parts] == (["so", "4"] if wanted else ["4"])

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "<think>so</think>\n\n4"), use)


def test_log_probs_limits_and_stop_strings_are_those_of_the_call():
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1beta/{PATH}"

        async def candidate(**fields: Any) -> dict[str, Any]:
            return (await call_of(server, "POST", path, json={**ASK, "generationConfig": fields}))[1]["candidates"][0]

        done = await candidate(responseLogprobs=True, stopSequences=["B"])
        assert (done["content"]["parts"], done["finishReason"]) == ([{"text": "A"}], "STOP")
        chosen = done["logprobsResult"]["chosenCandidates"]
        assert [(each["token"], each["logProbability"]) for each in chosen[:3]] == [(c, -0.25) for c in "ABC"]
        assert tuple(each["tokenId"] for each in chosen) == tokens_of("qwen3", "ABC")
        short = await candidate(maxOutputTokens=2)
        assert (short["content"]["parts"], short["finishReason"]) == ([{"text": "AB"}], "MAX_TOKENS")
        assert "logprobsResult" not in short

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "ABC"), use)


def test_results_without_ids_answer_the_open_calls_of_their_names_in_order():
    calls = ("model", [called("f", args={"a": 1}), called("g"), called("f", args={"a": 2})])
    results = ("user", [returned(name, {"output": text}) for name, text in (("g", "G"), ("f", "F1"), ("f", "F2"))])
    _, (_, asked), *answers = messages_of(("user", [{"text": "hi"}]), calls, results)
    assert [call.id for call in asked] == ["call_1", "call_2", "call_3"]
    expected = (("call_2", "G"), ("call_1", "F1"), ("call_3", "F2"))
    assert [parts for _, parts in answers] == [(ToolResult(i, (TextPart(text),)),) for i, text in expected]
    again = messages_of(("user", []), calls, results, calls, results)
    assert [part.call_id for _, parts in again[-3:] for part in parts] == ["call_5", "call_4", "call_6"]


def test_ids_survive_and_a_result_without_one_takes_that_of_its_call():
    asked = ("model", [called("f", id="x"), called("f", id="y")])
    answers = [("user", [returned("f", {"output": "1"}, id="y")]), ("user", [returned("f", {"output": "2"})])]
    messages = messages_of(asked, *answers)
    assert messages[0][1] == (ToolCall("x", "f", "{}"), ToolCall("y", "f", "{}"))
    assert [parts[0].call_id for _, parts in messages[1:]] == ["y", "x"]
    assert messages_of(("user", [returned("h", {"output": "3"})]))[0][1][0].call_id is None


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "7"}, "7"),
        ({"result": "7"}, "7"),
        ({"result": 7}, "7"),
        ({"output": ["ä"]}, '["ä"]'),
        ({"error": "none"}, '{"error": "none"}'),
        ({"output": "7", "unit": "m"}, '{"output": "7", "unit": "m"}'),
        ({}, "{}"),
    ],
)
def test_a_result_is_what_its_object_wraps(response: Any, text: str) -> None:
    assert messages_of(("user", [returned("f", response)])) == [("tool", (ToolResult(None, (TextPart(text),)),))]


def test_pieces_of_a_streams_turn_are_one_message_and_their_signature_is_of_the_whole_thought():
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1beta/{PATH}"
        body = {**ASK, "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
        done = (await call_of(server, "POST", path, json=body))[1]
        thought = done["candidates"][0]["content"]["parts"][0]
        text = thought["text"]
        pieces = [{"text": text[:2], "thought": True}, {**thought, "text": text[2:]}]
        pieces += [{"text": "It "}, {"text": "is."}, called("add", id="c")]
        (message,) = messages_of(*(("model", [piece]) for piece in pieces), ("user", []))[:1]
        assert message == ("assistant", (ThinkingPart(text), TextPart("It is."), ToolCall("c", "add", "{}")))
        changed = {**ASK, "contents": [{"role": "model", "parts": pieces[1:]}, *ASK["contents"]]}
        status, answer = await call_of(server, "POST", path, json=changed)
        assert (status, "contents.0.parts.0.thoughtSignature" in answer["error"]["message"]) == (400, True)

    serve(SpeakingGeneration("qwen3", speak), use)


def test_fields_are_read_in_snake_case_too_and_nulls_are_absent():
    body = {
        "contents": [{"role": None, "parts": [{"text": "hi", "function_call": None}]}],
        "system_instruction": {"parts": [{"text": "Be"}, {"text": "brief."}]},
        "tools": [{"function_declarations": [{"name": "f", "behavior": "BLOCKING"}]}],
        "tool_config": {
            "function_calling_config": {"mode": "ANY", "allowed_function_names": ["f"], "stream": True},
            "retrievalConfig": {"languageCode": "en"},
        },
        "generation_config": {
            "max_output_tokens": 3,
            "topK": 5,
            "response_schema": None,
            "thinkingConfig": {"thinkingBudget": 0},
        },
        "safetySettings": [{"category": "x"}],
    }
    call = Gemini().parse(json_bytes(body), ADDRESS)
    assert [(message.role, message.content) for message in call.messages] == [("system", "Be\nbrief."), ("user", "hi")]
    assert call.tools == ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
    assert call.forcing is not None
    assert (call.forcing.names, call.max_tokens) == (("f",), 3)
    assert call.ignored_fields == {
        "generationConfig.topK",
        "generationConfig.thinkingConfig.thinkingBudget",
        "toolConfig.retrievalConfig",
        "toolConfig.functionCallingConfig.stream",
        "tools.functionDeclarations.behavior",
    }


def test_names_of_ignored_fields_are_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    async def use(server: GatewayServer) -> None:
        thinking = {"thinkingBudget": 1, "thinkingLevel": "LOW"}
        body = {**ASK, "generationConfig": {"thinkingConfig": thinking}}
        await call_of(server, "POST", f"/sessions/{server.open_session()}/v1beta/{PATH}", json=body)

    with caplog.at_level("INFO"):
        serve(SpeakingGeneration("qwen3", lambda request, prompt: "ok"), use)
    for name in ("thinkingBudget", "thinkingLevel"):
        assert f"'generationConfig.thinkingConfig.{name}'" in caplog.text


@pytest.mark.parametrize("mode", ["AUTO", "NONE", "VALIDATED"])
def test_a_mode_that_demands_no_call_needs_no_tools(mode: str) -> None:
    chosen: Any = {"functionCallingConfig": {"mode": mode}}
    assert Gemini().parse(json_bytes({**ASK, "toolConfig": chosen}), ADDRESS).forcing is None
    tools = [{"functionDeclarations": [DECLARED]}]
    forcing = Gemini().parse(json_bytes({**ASK, "tools": tools, "toolConfig": chosen}), ADDRESS).forcing
    assert (forcing is not None) == (mode == "VALIDATED")
    chosen["functionCallingConfig"]["allowedFunctionNames"] = ["add"]
    if mode == "VALIDATED":
        assert Gemini().parse(json_bytes({**ASK, "tools": tools, "toolConfig": chosen}), ADDRESS).forcing == forcing
        return
    with pytest.raises(RequestError, match="only with mode ANY or VALIDATED"):
        Gemini().parse(json_bytes({**ASK, "tools": tools, "toolConfig": chosen}), ADDRESS)


def test_a_schema_of_openapi_is_read_as_a_json_schema():
    schema = {
        "type": "OBJECT",
        "properties": {
            "min_length": {"type": "STRING", "nullable": True, "min_length": 1, "maxLength": "8"},
            "list": {"type": "ARRAY", "items": {"any_of": [{"type": "INTEGER"}, {"type": "NUMBER"}]}, "minItems": "2"},
            "either": {"nullable": True, "anyOf": [{"type": "STRING"}, {"type": "INTEGER"}]},
            "word": {"type": "STRING", "nullable": True, "enum": ["a", "b"]},
            "pair": {"type": "ARRAY", "prefix_items": [{"type": "STRING"}, {"type": "INTEGER"}]},
        },
        "required": ["list"],
        "property_ordering": ["list", "min_length"],
    }
    assert read_openapi_schema(schema, "parameters") == {
        "type": "object",
        "properties": {
            "min_length": {"type": ["string", "null"], "minLength": 1, "maxLength": 8},
            "list": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "number"}]}, "minItems": 2},
            "either": {"anyOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"type": "null"}]},
            "word": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
            "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]},
        },
        "required": ["list"],
    }


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        ({}, "json_object", ""),
        ({"responseSchema": {"type": "STRING"}}, "json_schema", '{"type": "string"}'),
        ({"responseJsonSchema": {"type": "string"}}, "json_schema", '{"type": "string"}'),
    ],
)
def test_a_json_response_is_a_guided_one(config: Any, kind: str, text: str) -> None:
    body = {**ASK, "generationConfig": {"responseMimeType": "application/json", **config}}
    guide = Gemini().parse(json_bytes(body), ADDRESS).guide
    assert guide is not None
    assert (guide.kind, guide.text) == (kind, text)


def test_chat_completions_and_gemini_continue_one_history():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        async with client_of(server.session_url(session_id)) as client:
            tools: Any = [TOOL]
            await client.chat.completions.create(model="policy", messages=[HI], tools=tools)
        described = {**DECLARED, "description": "a sum"}
        body = {"contents": [*ASK["contents"], {"role": "model", "parts": [called("add", args={"a": 3, "b": 4})]}]}
        body["contents"].append({"parts": [returned("add", {"output": "7"})]})
        path = f"/sessions/{session_id}/v1beta/{PATH}"
        await call_of(server, "POST", path, json={**body, "tools": [{"functionDeclarations": [described]}]})
        assert len(server.close_session(session_id).chains()) == 1

    serve(SpeakingGeneration("qwen3", lambda request, prompt: CALL_TEXT if "tool_resp" not in prompt else "7"), use)


def test_a_stream_of_a_full_context_ends_with_its_reason():
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1beta/models/policy:streamGenerateContent?alt=sse"
        async with ClientSession(server.base_url) as client, client.post(path, json=ASK) as response:
            assert response.status == 200
            assert '"finishReason":"MAX_TOKENS"' in await response.text()

    generation = SpeakingGeneration("qwen3", lambda request, prompt: "ok")
    serve(generation, use, max_model_len=8, answers_full_context=True)


def test_an_engines_failure_ends_a_stream_with_googles_envelope():
    async def fail(request: Any) -> None:
        await asyncio.sleep(0)
        raise OSError("the engine's memory")

    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1beta/models/policy:streamGenerateContent?alt=sse"
        async with ClientSession(server.base_url) as client, client.post(path, json=ASK) as response:
            seen = await response.text()
        assert '"status":"INTERNAL"' in seen
        assert "memory" not in seen

    serve(SpeakingGeneration("qwen3", lambda request, prompt: "abc", between_tokens=fail), use)
