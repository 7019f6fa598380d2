"""What dialects share: sessions by header and key, errors, token counts, deltas while tokens are sampled."""

import asyncio
import itertools
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientSession
from anthropic import AsyncAnthropic

from nemo_rl.gateway.calls import CallDelta, ReasoningDelta, StreamStart, TextDelta
from nemo_rl.gateway.codec import ReadingRules
from nemo_rl.gateway.dialects.responses import Responses
from nemo_rl.gateway.server import SESSION_HEADER, GatewayServer
from nemo_rl.gateway.streaming import INTERVAL_S, ResponseStream, choose_interval_s, safe_length
from nemo_rl.types import Completion, GenerationRequest, Message, TextPart, ThinkingPart
from tests.unit.gateway.engines import (
    ADDRESS,
    CALL_TEXT,
    DEADLINE_S,
    TOOL,
    SpeakingGeneration,
    codec_of,
    json_bytes,
    text_of,
    tokens_of,
)
from tests.unit.gateway.test_server import HI, call_of, client_of, eventually, serve

ASK: Any = {"model": "m", "max_tokens": 64, "messages": [HI]}


def anthropic_client(base_url: str, key: str = "unused") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0, timeout=DEADLINE_S)


def speaking() -> SpeakingGeneration:
    return SpeakingGeneration("qwen3", lambda request, prompt: "ok")


def test_a_key_or_a_header_names_the_session_where_the_base_url_cannot():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        root = server.base_url
        async with anthropic_client(root, session_id) as messages, client_of(f"{root}/v1", session_id) as client:
            await messages.messages.create(**ASK)
            await client.chat.completions.create(model="m", messages=[HI])
            await client.responses.create(model="m", input="hi")
            assert (await messages.messages.count_tokens(model="m", messages=[HI])).input_tokens > 1
        body = {"model": "m", "input": "hi"}
        status, _ = await call_of(server, "POST", "/v1/responses", json=body, headers={SESSION_HEADER: session_id})
        assert status == 200
        assert (await call_of(server, "GET", f"/sessions/{session_id}"))[1]["num_calls"] == 4
        assert (await call_of(server, "POST", "/v1/responses", json=body))[1]["error"]["code"] == "no_session"
        server.close_session(session_id)
        async with anthropic_client(root, session_id) as messages:
            with pytest.raises(anthropic.ConflictError, match="this session is closed"):
                await messages.messages.create(**ASK)

    serve(speaking(), use)


def test_anthropics_client_gets_anthropics_errors():
    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        async with anthropic_client(f"{server.base_url}/sessions/{session_id}") as client:
            tool: Any = {"name": "f", "input_schema": {"type": "object"}}
            with pytest.raises(anthropic.BadRequestError, match=r"tool_choice\.type") as refused:
                await client.messages.create(**ASK, tools=[tool], tool_choice={"type": "any"})
            assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        async with anthropic_client(f"{server.base_url}/sessions/unknown") as client:
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await client.messages.create(**ASK)
            assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]

    serve(speaking(), use)


def test_an_unknown_previous_response_is_named():
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
            assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")

    serve(speaking(), use)


@pytest.mark.parametrize("item_id", ["msg_0", "rs_x", "fc_RESPONSE_1", "msg_RESPONSE_99999", "résumé"])
def test_a_reference_to_an_item_that_is_none_is_named(item_id: str) -> None:
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            done = await client.responses.create(model="m", input="hi")
            wrong = item_id.replace("RESPONSE", done.id.removeprefix("resp_"))
            items: Any = [HI, {"type": "item_reference", "id": wrong}, HI]
            with pytest.raises(openai.NotFoundError) as error:
                await client.responses.create(model="m", input=items)
            assert (error.value.param, error.value.code) == ("input.1.id", "item_not_found")

    serve(speaking(), use)


def test_a_reference_to_an_item_of_another_session_is_unknown() -> None:
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            done = await client.responses.create(model="m", input="hi")
        items: Any = [HI, {"type": "item_reference", "id": done.output[0].id}, HI]
        async with client_of(server.session_url(server.open_session())) as client:
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="m", input=items)

    serve(speaking(), use)


def test_references_to_two_responses_are_two_messages() -> None:
    responses = {f"resp_{i}": (ThinkingPart(f"on {i}"), TextPart(text)) for i, text in enumerate(("one", "two"))}
    items: Any = [{"type": "item_reference", "id": f"{kind}_{i}"} for i in (0, 1) for kind in ("rs", "msg")]
    body = json_bytes({"model": "m", "input": [HI, *items, HI]})
    call = Responses().parse(body, ADDRESS, lambda name: Message("assistant", responses[name]))
    assert [message.parts for message in call.messages[1:-1]] == list(responses.values())


def test_tokens_are_counted_as_the_call_would_have_them():
    async def use(server: GatewayServer) -> None:
        async with anthropic_client(f"{server.base_url}/sessions/{server.open_session()}") as client:
            system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
            counted = await client.messages.count_tokens(model="m", messages=[HI], system=system)
            done = await client.messages.create(**ASK, system=system)
            assert counted.input_tokens == done.usage.input_tokens

    serve(speaking(), use)


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_events_are_sent_while_tokens_are_sampled_and_an_engines_failure_ends_the_stream(path):
    gate = asyncio.Event()

    async def hold(request: GenerationRequest) -> None:
        generation.num_told += 1
        if generation.num_told == 3:
            await gate.wait()
            raise OSError("the engine's memory")

    generation: Any = SpeakingGeneration("qwen3", lambda request, prompt: "abcdef", between_tokens=hold)
    generation.num_told = 0

    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        body = {**ASK, "stream": True} if path != "responses" else {"input": "hi", "stream": True}
        async with (
            ClientSession(server.base_url) as client,
            client.post(f"/sessions/{session_id}/v1/{path}", json=body) as response,
        ):
            seen = b""
            while b'"a"' not in seen:
                seen += await response.content.readany()
            assert not gate.is_set()
            gate.set()
            rest = await response.content.read()
        assert b"the engine failed" in rest
        assert b"memory" not in rest
        assert (await call_of(server, "GET", f"/sessions/{session_id}"))[1]["num_calls"] == 0
        await eventually(lambda: server._completions.queue.num_running == 0)

    serve(generation, use)


def deltas_of(text: str, *, size: int = 1, stop_strings: tuple[str, ...] = (), is_thinking: bool = False) -> list[Any]:
    """Deltas of a response whose tokens come `size` at a time."""
    codec, sent = codec_of("qwen3"), []
    rules = ReadingRules("1", stop_strings, is_thinking=is_thinking)
    ids = tokens_of("qwen3", text)
    times = itertools.count(step=INTERVAL_S)
    stream = ResponseStream(codec, StreamStart("id", "m", 1), sent.append, rules, clock=lambda: next(times))
    for start in range(0, len(ids), size):
        stream.feed(start, ids[start : start + size])
    response = codec.read(ids, rules)
    stream.finish(Completion("r", ids, (0.0,) * len(ids), "stop"), response)
    assert isinstance(sent[0], StreamStart)
    texts = {
        kind: "".join(each.text for each in sent if isinstance(each, kind)) for kind in (TextDelta, ReasoningDelta)
    }
    assert texts[TextDelta].lstrip() == response.message.content.lstrip()
    assert texts[ReasoningDelta] == (response.reasoning or "")
    assert tuple(each.call for each in sent if isinstance(each, CallDelta)) == response.message.tool_calls
    return sent[1:]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        " padded ",
        "Zürich 東京 🦜 done",
        "<think>so</think>\n\n4",
        "<think>cut off",
        "never opened</think>\n\n4",
        f"never opened</think> {CALL_TEXT}",
        "<thinking is not it",
        f"a <b {CALL_TEXT}",
        f"<think>sum</think>\nLet me.\n{CALL_TEXT}{CALL_TEXT}",
        f"{CALL_TEXT} and then {CALL_TEXT} more",
        "a <tool_call>broken</tool_call> b",
        "a <tool_call>{never closed",
        '<tool_call>{"name": "f", "arguments": {}}',
    ],
)
def test_deltas_add_up_to_the_message(text, size):
    deltas_of(text, size=size)


def test_no_delta_splits_a_character_or_holds_markup():
    sent = deltas_of(f"Zürich 🦜 <tool {CALL_TEXT}")
    texts = [each.text for each in sent if isinstance(each, TextDelta)]
    assert len(texts) > 5
    assert "".join(texts) == "Zürich 🦜 <tool"
    assert not any("\ufffd" in text for text in texts)


def test_tokens_that_come_fast_share_a_delta_after_the_first():
    sent: list[Any] = []
    now = [1.0]
    ids = tokens_of("qwen3", "abcdefgh")
    stream = ResponseStream(
        codec_of("qwen3"), StreamStart("id", "m", 1), sent.append, ReadingRules("1"), clock=lambda: now[0]
    )
    for i in range(5):
        stream.feed(i, ids[i : i + 1])
    assert [each.text for each in sent[1:]] == ["a"]
    now[0] += INTERVAL_S
    stream.feed(5, ids[5:6])
    assert [each.text for each in sent[1:]] == ["a", "bcdef"]
    stream.finish(Completion("r", ids, (0.0,) * len(ids), "stop"), codec_of("qwen3").read(ids, ReadingRules("1")))
    assert [each.text for each in sent[1:]] == ["a", "bcdef", "gh"]


class Timers:
    """The event loop's `call_later`, whose time the test sets."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Any, Any]] = []  # (delay, callback, handle)

    def call_later(self, delay: float, callback: Any) -> Any:
        handle = asyncio.TimerHandle(delay, callback, (), FakeLoop())  # type: ignore[arg-type]
        self.waiting.append((delay, callback, handle))
        return handle

    def elapse(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _, callback, handle in waiting:
            if not handle.cancelled():
                callback()


class FakeLoop:
    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: Any) -> None:
        """Forget nothing: the test keeps the handles."""


def test_a_token_that_nothing_follows_is_sent_when_the_interval_is_over():
    sent: list[Any] = []
    now, timers = [1.0], Timers()
    ids = tokens_of("qwen3", "abcdef")
    start = StreamStart("id", "m", 1)
    with ResponseStream(
        codec_of("qwen3"), start, sent.append, ReadingRules("1"), clock=lambda: now[0], call_later=timers.call_later
    ) as stream:
        stream.feed(0, ids[:1])
        assert (sent, timers.waiting) == ([start, TextDelta("a")], [])
        now[0] += INTERVAL_S / 3
        stream.feed(1, ids[1:2])
        stream.feed(2, ids[2:3])
        assert [delay for delay, _, _ in timers.waiting] == [pytest.approx(INTERVAL_S * 2 / 3)]
        assert sent[2:] == []
        now[0] += INTERVAL_S * 2 / 3
        timers.elapse()
        assert sent[2:] == [TextDelta("bc")]
        stream.feed(3, ids[3:4])
        assert len(timers.waiting) == 1
    timers.elapse()  # cancelled when the block was left
    assert sent[3:] == []


@pytest.mark.parametrize(("num_calls", "interval_s"), [(0, 0.05), (16, 0.05), (64, 0.2), (80, 0.25), (4096, 0.25)])
def test_streams_beside_many_calls_have_fewer_deltas(num_calls: int, interval_s: float) -> None:
    assert choose_interval_s(num_calls) == pytest.approx(interval_s)
    sent, timers, ids = [], Timers(), tokens_of("qwen3", "abc")
    with ResponseStream(
        codec_of("qwen3"),
        StreamStart("id", "m", 1),
        sent.append,
        ReadingRules("1"),
        interval_s=lambda: choose_interval_s(num_calls),
        clock=lambda: 1.0,
        call_later=timers.call_later,
    ) as stream:
        for i in range(3):
            stream.feed(i, ids[i : i + 1])
        assert [delay for delay, _, _ in timers.waiting] == [pytest.approx(interval_s)]


def test_a_stream_starts_with_the_first_token_though_its_text_is_held_back():
    for codec in (codec_of("qwen3"), codec_with_vllms_parser()):
        sent: list[Any] = []
        start = StreamStart("id", "m", 1)
        stream = ResponseStream(codec, start, sent.append, ReadingRules("1"))
        stream.feed(0, ())
        assert sent == []
        stream.feed(0, tokens_of("qwen3", "<think>")[:1])
        assert sent == [start]


def codec_with_vllms_parser() -> Any:
    codec = codec_of("qwen3")
    codec.tool_parser_name = "a parser without an entry in streaming.py"
    return codec


def test_text_ends_before_a_stop_string_that_came_in_parts():
    sent = deltas_of("one STOP two", stop_strings=("STOP",))
    assert "".join(each.text for each in sent) == "one "


def test_thinking_that_the_prompt_opened_is_no_text():
    sent = deltas_of("so it is</think>\n\n4", is_thinking=True)
    assert [type(each) for each in sent][-1] is TextDelta
    assert "".join(each.text for each in sent if isinstance(each, ReasoningDelta)) == "so it is"


@pytest.mark.parametrize(
    ("text", "length"),
    [("a <tool", 2), ("a <b", 4), ("a", 1), ("", 0), ("<", 0), ("<tool_call", 0), ("x<tool_call>", 12)],
)
def test_an_end_that_may_begin_a_marker_is_not_safe(text, length):
    assert safe_length(text, ("<tool_call>",)) == length


@pytest.mark.parametrize("hides", [False, True])
def test_tools_are_rendered_alike_whatever_the_choice_unless_they_are_hidden(hides: bool) -> None:
    async def use(server: GatewayServer) -> None:
        async with client_of(server.session_url(server.open_session())) as client:
            tools: Any = [TOOL]
            for choice in ("auto", "none"):
                await client.chat.completions.create(model="m", messages=[HI], tools=tools, tool_choice=choice)
            await client.chat.completions.create(model="m", messages=[HI])
        with_tools, without_choice, without_tools = (request.token_ids for request in generation.requests)
        assert (with_tools == without_choice) == (not hides)
        assert (without_choice == without_tools) == hides

    generation = speaking()
    serve(generation, use, hides_unused_tools=hides)


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_of_a_namespace_is_called_by_both_names_and_its_item_continues_the_history(stream: bool) -> None:
    def speak(request: GenerationRequest, prompt: str) -> str:
        if "<tool_response>" in prompt:
            return "done"
        return '<tool_call>\n{"name": "files.read", "arguments": {}}\n</tool_call>'

    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        tools: Any = [{"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}]
        async with client_of(server.session_url(session_id)) as client:
            ask: dict[str, Any] = {"model": "m", "tools": tools, "stream": stream}
            items: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(2):
                done: Any = await client.responses.create(input=items, **ask)
                if stream:
                    done = [event async for event in done][-1].response
                items += [item.to_dict() for item in done.output]
                calls = [item for item in done.output if item.type == "function_call"]
                outputs = [{"type": "function_call_output", "call_id": c.call_id, "output": "x"} for c in calls]
                items += outputs
        assert (items[1]["namespace"], items[1]["name"]) == ("files", "read")
        assert '"name": "files.read"' in text_of("qwen3", generation.requests[0].token_ids)
        (chain,) = server.close_session(session_id).chains()
        assert [m.is_generated for m in chain.message_log] == [False, True, False, True]

    generation = SpeakingGeneration("qwen3", speak)
    serve(generation, use)


NAMESPACED = ("files.local.read", "files.search", "files", "plain.f", "plain.g", "other")
TOOLS_WITH_DOTS = [
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "search"}]},
    {"type": "namespace", "name": "files.local", "tools": [{"type": "function", "name": "read"}]},
    {"type": "namespace", "name": "plain", "tools": [{"type": "function", "name": "g"}]},
    {"type": "function", "name": "plain.f"},
]
ITEMS_WITH_DOTS = [
    *(("files.local", "read"), ("files", "search"), (None, "files")),
    *((None, "plain.f"), ("plain", "g"), (None, "other")),
]


def test_namespaces_and_functions_with_dots_in_their_names_are_told_apart():
    called = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in NAMESPACED)
    generation = SpeakingGeneration("qwen3", lambda request, prompt: "done" if "<tool_resp" in prompt else called)

    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        async with client_of(server.session_url(session_id)) as client:
            tools: Any = TOOLS_WITH_DOTS
            done: Any = await client.responses.create(model="m", input="hi", tools=tools)
            items = [item.to_dict() for item in done.output]
            assert [(item.get("namespace"), item["name"]) for item in items] == ITEMS_WITH_DOTS
            outputs = [{"type": "function_call_output", "call_id": c["call_id"], "output": "x"} for c in items]
            history: Any = [{"role": "user", "content": "hi"}, *items, *outputs]
            await client.responses.create(model="m", input=history, tools=tools)
        assert len(server.close_session(session_id).chains()) == 1

    serve(generation, use)


SERIAL: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"parallel_tool_calls": False, "tools": [TOOL]}),
    ("responses", {"parallel_tool_calls": False, "tools": [{"type": "function", **TOOL["function"]}]}),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": [{"name": "add"}]}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), SERIAL)
def test_a_client_that_takes_one_call_at_a_time_gets_the_first(path: str, fields: dict[str, Any], stream: bool) -> None:
    text = f"{CALL_TEXT}\n{CALL_TEXT.replace('add', 'multiply')}"
    generation = SpeakingGeneration("qwen3", lambda request, prompt: text)

    async def use(server: GatewayServer) -> None:
        session_id = server.open_session()
        body = {"input": "hi"} if path == "responses" else {**ASK, "max_tokens": 256}
        async with (
            ClientSession(server.base_url) as client,
            client.post(f"/sessions/{session_id}/v1/{path}", json={**body, **fields, "stream": stream}) as response,
        ):
            seen = await response.text()
        (chain,) = server.close_session(session_id).chains()
        (call,) = chain.message_log[-1].message.tool_calls
        assert call.arguments == '{"a": 3, "b": 4}'
        assert call.id in seen
        assert "multiply" not in seen
        assert chain.message_log[-1].token_ids == tokens_of("qwen3", text)

    serve(generation, use)


def test_edits_of_the_context_that_keep_everything_are_accepted():
    async def use(server: GatewayServer) -> None:
        async with anthropic_client(f"{server.base_url}/sessions/{server.open_session()}") as client:
            edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
            kept = await client.messages.create(**ASK, extra_body={"context_management": edits})
            assert kept.stop_reason == "end_turn"

    serve(speaking(), use)


def test_an_error_of_a_timed_reading_is_raised_by_the_next_call_and_reads_no_token_twice():
    ids, response = tokens_of("qwen3", "abcd"), codec_of("qwen3").read(tokens_of("qwen3", "abcd"), ReadingRules("1"))
    completion = Completion("r", ids, (0.0,) * len(ids), "stop")
    sent: list[Any] = []

    def sink(delta: Any) -> None:
        if delta == TextDelta("b"):
            raise OSError("the client is gone")
        sent.append(delta)

    timers, start = Timers(), StreamStart("id", "m", 1)
    stream = ResponseStream(
        codec_of("qwen3"), start, sink, ReadingRules("1"), clock=lambda: 1.0, call_later=timers.call_later
    )
    stream.feed(0, ids[:1])
    stream.feed(1, ids[1:2])
    timers.elapse()  # raises nothing into the event loop
    with pytest.raises(OSError, match="the client is gone"):
        stream.feed(2, ids[2:3])
    with pytest.raises(OSError, match="the client is gone"):
        stream.finish(completion, response)
    assert sent == [start, TextDelta("a")]
