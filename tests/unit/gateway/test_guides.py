"""Guided responses: who may ask for them, what the engine is told, and that training never sees their log-probs."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nemo_rl.gateway.server import GatewayServer
from nemo_rl.types import Guide
from tests.unit.gateway.engines import DEADLINE_S, SpeakingGeneration, started
from tests.unit.gateway.test_server import call_of

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "string"}
AS_SCHEMA = Guide("json_schema", '{"type": "string"}')
FORMAT = {"type": "json_schema", "schema": SCHEMA}
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
GUIDED: list[tuple[str, dict[str, Any], str, Guide]] = [  # path, fields, the field that an error names
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", Guide("json_object")),
    (CHAT, {"structured_outputs": {"regex": "[0-9]+"}}, "structured_outputs", Guide("regex", "[0-9]+")),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format", Guide("json_object")),
    (RESPONSES, {"text": {"format": {**FORMAT, "name": "s", "strict": True}}}, "text.format", AS_SCHEMA),
    (RESPONSES, {"structured_outputs": {"regex": "[0-9]+"}}, "structured_outputs", Guide("regex", "[0-9]+")),
    (MESSAGES, {"output_config": {"format": FORMAT, "effort": "low"}}, "output_config.format", AS_SCHEMA),
    (MESSAGES, {"output_format": FORMAT}, "output_format", AS_SCHEMA),
]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
NAMED = {"type": "function", "name": "f"}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "g"}}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION}, {"type": "function", "name": "g"}]
MESSAGES_TOOLS = [{"name": "f", "input_schema": {}}, {"name": "g", "input_schema": {}}]
NESTED = {"type": "function", "function": {"name": "f"}}
FORCED: list[tuple[str, Any, Any]] = [  # path, tools, tool_choice
    (CHAT, CHAT_TOOLS, "required"),
    (CHAT, CHAT_TOOLS, NESTED),
    (CHAT, CHAT_TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NESTED]}}),
    (CHAT, CHAT_TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": CHAT_TOOLS}}),
    (RESPONSES, RESPONSES_TOOLS, "required"),
    (RESPONSES, RESPONSES_TOOLS, NAMED),
    (RESPONSES, RESPONSES_TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}),
    (MESSAGES, MESSAGES_TOOLS, {"type": "any"}),
    (MESSAGES, MESSAGES_TOOLS, {"type": "tool", "name": "f"}),
]
FREE: list[tuple[str, Any, Any]] = [
    (CHAT, CHAT_TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": CHAT_TOOLS}}),
    (RESPONSES, RESPONSES_TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": RESPONSES_TOOLS}),
    (MESSAGES, MESSAGES_TOOLS, {"type": "auto", "disable_parallel_tool_use": True}),
]
GUIDES: list[tuple[dict[str, Any], Guide]] = [
    ({"response_format": {"type": "json_object"}}, Guide("json_object")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string"}}}},
        Guide("json_schema", '{"type": "string"}'),
    ),
    ({"structured_outputs": {"regex": "[0-9]+"}}, Guide("regex", "[0-9]+")),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Guide("grammar", 'root ::= "a"')),
    ({"structured_outputs": {"json": {"type": "string"}}}, Guide("json_schema", '{"type": "string"}')),
]
MALFORMED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
    {"structured_outputs": {}, "response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a", "grammar": "b"}},
    {"structured_outputs": {"choice": ["a"]}},
]


def use(body: Callable[[GatewayServer, SpeakingGeneration], Awaitable[None]], **rules: Any) -> None:
    async def main() -> None:
        generation = SpeakingGeneration("chatml", lambda request, text: "7")
        server = await started(generation, **{"can_guide": True, **rules})
        try:
            await asyncio.wait_for(body(server, generation), DEADLINE_S)
        finally:
            await server.close()

    asyncio.run(main())


async def ask_at(server: GatewayServer, session: str, path: str, **fields: Any) -> tuple[int, Any]:
    """Ask in one of the APIs; `path` names it."""
    body = {"model": "m", "input": "hi"} if path == RESPONSES else {"model": "m", "messages": [HI], "max_tokens": 8}
    return await call_of(server, "POST", f"/sessions/{session}/v1/{path}", json={**body, **fields})


async def ask(server: GatewayServer, session: str, **fields: Any) -> tuple[int, Any]:
    path = f"/sessions/{session}/v1/chat/completions"
    return await call_of(server, "POST", path, json={"messages": [HI], **fields})


def masks(server: GatewayServer, session: str) -> list[list[bool]]:
    """Of each message of each chain whether it is trained."""
    return [[m.is_generated for m in chain.message_log] for chain in server.close_session(session).chains()]


@pytest.mark.parametrize(("fields", "guide"), GUIDES)
def test_validation_hands_the_constraint_to_the_engine(fields: dict[str, Any], guide: Guide) -> None:
    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session(trains=False)
        status, _ = await ask(server, session, **fields)
        assert status == 200
        assert generation.requests[-1].sampling.guide == guide
        assert masks(server, session) == [[False, True]]

    use(body)


def test_training_refuses_with_the_reason_unless_these_calls_are_not_trained() -> None:
    fields = {"response_format": {"type": "json_object"}}

    async def refused(server: GatewayServer, generation: SpeakingGeneration) -> None:
        for path in (f"/sessions/{server.open_session()}/v1", "/v1"):
            body = {"messages": [HI], **fields}
            status, answer = await call_of(server, "POST", f"{path}/chat/completions", json=body)
            assert (status, answer["error"]["param"]) == (400, "response_format")
            assert "masked distribution" in answer["error"]["message"]
        assert not generation.requests

    async def untrained(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session()
        status, answer = await ask(server, session, **fields)
        assert status == 200
        turns = [HI, answer["choices"][0]["message"], HI]
        assert (await ask(server, session, messages=turns))[0] == 200
        assert masks(server, session) == [[False, False, False, True]]  # the second response alone is trained

    use(refused)
    use(untrained, guided_calls="untrained")


def test_an_engine_that_cannot_guide_is_never_asked_to() -> None:
    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        status, answer = await ask(server, server.open_session(trains=False), response_format={"type": "json_object"})
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert (await ask(server, server.open_session(), response_format={"type": "text"}))[0] == 200

    use(body, can_guide=False)


def test_malformed_constraints_are_400() -> None:
    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session(trains=False)
        for fields in MALFORMED:
            status, answer = await ask(server, session, **fields)
            assert status == 400, fields
            assert answer["error"]["param"].split(".")[0] in fields, answer
        assert not generation.requests

    use(body)


@pytest.mark.parametrize(("path", "fields", "param", "guide"), GUIDED)
def test_each_api_has_its_own_field_for_a_constraint(
    path: str, fields: dict[str, Any], param: str, guide: Guide
) -> None:
    async def served(server: GatewayServer, generation: SpeakingGeneration) -> None:
        status, answer = await ask_at(server, server.open_session(trains=False), path, **fields)
        assert status == 200, answer
        assert generation.requests[-1].sampling.guide == guide
        status, answer = await ask_at(server, server.open_session(), path, **fields)
        assert status == 400
        assert "masked distribution" in answer["error"]["message"]
        assert answer["error"].get("param", answer["error"]["message"].split(":")[0]) == param
        if path == MESSAGES:  # counting tokens samples none
            assert (await ask_at(server, server.open_session(), f"{path}/count_tokens", **fields))[0] == 200

    use(served)


@pytest.mark.parametrize(("path", "tools", "choice"), FORCED)
def test_a_demand_for_a_call_is_refused_or_left_to_the_policy(path: str, tools: Any, choice: Any) -> None:
    async def refused(server: GatewayServer, generation: SpeakingGeneration) -> None:
        status, answer = await ask_at(server, server.open_session(), path, tools=tools, tool_choice=choice)
        assert status == 400
        assert answer["error"]["message"].startswith("tool_choice")
        assert "gateway.forced_tool_choice" in answer["error"]["message"]
        assert not generation.requests

    async def left(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session()
        assert (await ask_at(server, session, path, tools=tools, tool_choice=choice))[0] == 200
        assert (await ask_at(server, session, path, tools=tools))[0] == 200
        first, second = generation.requests
        assert first.token_ids == second.token_ids
        assert first.sampling == second.sampling
        assert masks(server, session) == [[False, True]] * 2

    use(refused)
    use(left, forced_tool_choice="auto")


@pytest.mark.parametrize(("path", "tools", "choice"), FORCED)
def test_a_demand_for_a_call_guides_the_engine_to_the_chosen_tools(path: str, tools: Any, choice: Any) -> None:
    is_required = not (isinstance(choice, dict) and "auto" in json.dumps(choice))
    is_all = choice in ("required", {"type": "any"}) or '"g"' in json.dumps(choice)

    async def served(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session(trains=False)
        assert (await ask_at(server, session, path, tools=tools, tool_choice=choice))[0] == 200
        guide = generation.requests[-1].sampling.guide
        assert guide is not None
        assert guide.kind == "structural_tag"
        form = json.loads(guide.text)["format"]
        begins = ['<tool_call>\n{"name": "f", "arguments": ', '<tool_call>\n{"name": "g", "arguments": ']
        assert [tag["begin"] for tag in form["tags"]] == (begins if is_all else begins[:1])
        assert form["tags"][0]["content"]["json_schema"]["type"] == "object"
        assert (form["at_least_one"], form["stop_after_first"]) == (is_required, is_required)
        assert masks(server, session) == [[False, True]]

    async def refused(server: GatewayServer, generation: SpeakingGeneration) -> None:
        status, answer = await ask_at(server, server.open_session(), path, tools=tools, tool_choice=choice)
        assert (status, "masked distribution" in answer["error"]["message"]) == (400, True)

    async def untrained(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session()
        assert (await ask_at(server, session, path, tools=tools, tool_choice=choice))[0] == 200
        assert masks(server, session) == [[False, False]]

    use(served, forced_tool_choice="guided")
    use(refused, forced_tool_choice="guided")
    use(untrained, forced_tool_choice="guided", guided_calls="untrained")


def test_a_demand_for_a_call_excludes_another_constraint() -> None:
    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session(trains=False)
        fields = {"tools": CHAT_TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}
        status, answer = await ask_at(server, session, CHAT, **fields)
        assert (status, answer["error"]["param"]) == (400, "tool_choice")

    use(body, forced_tool_choice="guided")


@pytest.mark.parametrize(("path", "tools", "choice"), FREE)
def test_a_choice_among_all_tools_is_no_demand(path: str, tools: Any, choice: Any) -> None:
    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        assert (await ask_at(server, server.open_session(), path, tools=tools, tool_choice=choice))[0] == 200

    use(body)


@pytest.mark.parametrize(
    ("path", "tools", "choice"),
    [(CHAT, None, "required"), (RESPONSES, [], "required"), (MESSAGES, None, {"type": "any"})],
)
@pytest.mark.parametrize("mode", ["refused", "auto", "guided"])
def test_a_demand_for_a_call_needs_tools(path: str, tools: Any, choice: Any, mode: str) -> None:
    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        session = server.open_session(trains=False)
        status, answer = await ask_at(server, session, path, tools=tools, tool_choice=choice)
        error = answer["error"]
        field = "tool_choice.type" if path == MESSAGES else "tool_choice"
        assert (status, error.get("param", field)) == (400, field)
        assert error["message"] == f"{field}: a call that is required needs tools"
        assert not generation.requests

    use(body, forced_tool_choice=mode)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        *((path, {"tools": tools, "tool_choice": choice}, "tool_choice") for path, tools, choice in FORCED),
        *((path, fields, param) for path, fields, param, _ in GUIDED),
    ],
)
def test_a_guided_response_is_refused_where_the_prompt_opens_thinking(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr("nemo_rl.gateway.codec.Codec.opens_thinking", lambda codec, token_ids: True)
    choice = fields.get("tool_choice")
    may_be_text = isinstance(choice, dict) and "auto" in json.dumps(choice)  # in which thinking can close

    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        status, answer = await ask_at(server, server.open_session(trains=False), path, **fields)
        assert status == (200 if may_be_text else 400)
        assert len(generation.requests) == may_be_text
        if not may_be_text:
            assert answer["error"]["message"].startswith(param)
            assert "the chat template opens thinking" in answer["error"]["message"]
        assert (await ask_at(server, server.open_session(), path))[0] == 200

    use(body, forced_tool_choice="guided")


@pytest.mark.parametrize(("path", "fields", "param", "guide"), GUIDED)
def test_a_guided_response_is_refused_where_the_parser_takes_it_for_thinking(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str, guide: Guide
) -> None:
    monkeypatch.setattr("nemo_rl.gateway.codec.Codec.takes_for_thinking", lambda codec, asked: asked == guide)

    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        status, answer = await ask_at(server, server.open_session(trains=False), path, **fields)
        text = f"{param}: reasoning parser think takes a response without a closing tag for thinking"
        remedy = "; use another gateway.reasoning_parser, or none"
        assert (status, answer["error"]["message"]) == (400, text + remedy)
        assert not generation.requests

    use(body)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, "response_format or structured_outputs"),
        (RESPONSES, "text.format or structured_outputs"),
        (MESSAGES, "output_config.format"),
    ],
)
def test_vllms_older_options_name_the_apis_own_field(path: str, fields: str) -> None:
    async def body(server: GatewayServer, generation: SpeakingGeneration) -> None:
        status, answer = await ask_at(server, server.open_session(), path, guided_regex="a")
        assert (status, answer["error"]["message"]) == (400, f"guided_regex: not supported; use {fields}")

    use(body)
