"""A malformed or unsupported request gets its dialect's own error, with the field named."""

from typing import Any

import pytest

from nemo_rl.gateway.dialects.chat_completions import ChatCompletions
from nemo_rl.gateway.dialects.dialect import Dialect
from nemo_rl.gateway.dialects.messages import Messages
from nemo_rl.gateway.dialects.responses import Responses
from nemo_rl.gateway.request_errors import RequestError
from tests.unit.gateway.engines import ADDRESS, json_bytes

HI: dict[str, Any] = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
OUTPUT = {"type": "json_schema", "schema": {}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


def after_hi(*messages: Any) -> list[Any]:
    return [HI, *messages]


def tool_calls(*calls: Any) -> dict[str, Any]:
    return {"messages": after_hi({"role": "assistant", "tool_calls": list(calls)}, HI)}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, HI]}


def items(*each: Any) -> dict[str, Any]:
    return {"input": list(each)}


COMMON: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": 3}),
    ("stream", {"stream": "yes"}),
    ("stream", {"stream": 1}),
    ("tools", {"tools": "f"}),
    ("tools", {"tools": {"name": "f"}}),
    ("tools.0", {"tools": [3]}),
]
REFUSED_BY_ALL: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: "[0-9]+"}) for name in ("guided_regex", "guided_choice", "guided_grammar", "guided_json")),
    ("guided_decoding_backend", {"guided_decoding_backend": "outlines"}),
    ("logit_bias", {"logit_bias": {"1": 5}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("continue_final_message", {"continue_final_message": True}),
    ("add_generation_prompt", {"add_generation_prompt": False}),
    ("bad_words", {"bad_words": ["a"]}),
    ("min_tokens", {"min_tokens": 3}),
    ("ignore_eos", {"ignore_eos": True}),
    ("n", {"n": 2}),
]
CHAT: list[tuple[str, dict[str, Any]]] = [
    *COMMON,
    *REFUSED_BY_ALL,
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": {}}),
    ("messages.0", {"messages": ["hi"]}),
    ("messages.0.role", {"messages": [{"content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": "function", "content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": 1, "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": {"text": "x"}}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
    ("messages.0.name", {"messages": [{"role": "user", "content": "x", "name": 3}]}),
    ("messages.0.name", {"messages": [{"role": "user", "content": "x", "name": {"a": 1}}]}),
    ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    ("messages.0.content.0.text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages.1.tool_calls", {"messages": after_hi({"role": "assistant", "tool_calls": {}})}),
    ("messages.1.tool_calls.0.function", tool_calls({"id": "a"})),
    ("messages.1.tool_calls.0.function.name", tool_calls({"function": {}})),
    ("messages.1.tool_calls.0.function.arguments", tool_calls({"function": {"name": "f", "arguments": 3}})),
    ("messages.1.tool_calls.0.type", tool_calls({"type": "custom", "function": {"name": "f"}})),
    ("messages.1.tool_calls.0.id", tool_calls({"id": 3, "function": {"name": "f"}})),
    ("messages.1.tool_call_id", {"messages": after_hi({"role": "tool", "content": "7", "tool_call_id": 3})}),
    ("messages.1.function_call", {"messages": after_hi({"role": "assistant", "function_call": {"name": "f"}})}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("tools.0.type", {"tools": [{"type": "custom", "function": {"name": "f"}}]}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": "any"}),
    ("tool_choice", {"tool_choice": FUNCTION}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": {"type": "custom"}}),
    ("tool_choice", {"tool_choice": 3}),
    ("n", {"n": 2}),
    ("n", {"n": "1"}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop", {"stop": 3}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "10"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 3}),
    ("stream_options", {"stream_options": "usage"}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": "json"}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema", "schema": {}}}),
    ("modalities", {"modalities": ["audio"]}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("messages.1.reasoning_content", {"messages": after_hi({"role": "assistant", "reasoning_content": 3})}),
    ("system", {"system": "be brief"}),
    ("instructions", {"instructions": "be brief"}),
    ("text", {"text": {"format": {"type": "json_object"}}}),
    ("output_config", {"output_config": {"format": OUTPUT}}),
]
CLEAR = {"type": "clear_thinking_20251015"}
CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
MESSAGES: list[tuple[str, dict[str, Any]]] = [
    *COMMON,
    *REFUSED_BY_ALL,
    ("messages", {"messages": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages.0", {"messages": ["hi"]}),
    ("messages.0.role", {"messages": [{"content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages.0.role", {"messages": [{"role": "developer", "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 3}]}),
    ("messages.0.content", turn({"text": "x"})),
    ("messages.0.content", turn({"type": 3})),
    ("messages.0.content.0.text", turn({"type": "text"})),
    ("messages.0.content.0.type", turn({"type": "image", "source": {}})),
    ("messages.0.content.0.type", turn({"type": "document", "source": {}})),
    ("messages.0.content.1.type", turn({"type": "text", "text": "a"}, {"type": "image", "source": {}})),
    ("messages.0.content.0.tool_use_id", turn({"type": "tool_result", "content": "7"})),
    ("messages.0.content", turn({"type": "tool_result", "tool_use_id": 3, "content": "7"})),
    ("messages.0.content", turn({"type": "tool_result", "tool_use_id": "a", "content": 7})),
    (
        "messages.0.content.0.content.0.type",
        turn({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}),
    ),
    ("messages.0.content.0.id", turn({**CALLED, "id": None}, role="assistant")),
    ("messages.0.content.0.name", turn({**CALLED, "name": None}, role="assistant")),
    ("messages.0.content.0.input", turn({**CALLED, "input": None}, role="assistant")),
    ("messages.0.content", turn({**CALLED, "input": "{}"}, role="assistant")),
    ("messages.0.content.0.type", turn({"type": "server_tool_use", "id": "a"}, role="assistant")),
    ("messages.0.content.0.signature", turn({"type": "thinking", "thinking": "a"}, role="assistant")),
    (
        "messages.0.content.0.signature",
        turn({"type": "thinking", "thinking": "a", "signature": "forged"}, role="assistant"),
    ),
    ("messages", {"messages": [HI, {"role": "assistant", "content": "It is"}]}),
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "10"}),
    ("model", {"model": None}),
    ("system", {"system": 3}),
    ("system", {"system": [3]}),
    ("system.0.type", {"system": [{"type": "image", "source": {}}]}),
    ("tools.0.name", {"tools": [{"input_schema": {}}]}),
    ("tools.0.name", {"tools": [{"name": ""}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": "{}"}]}),
    ("tools.0.type", {"tools": [{"name": "bash", "type": "bash_20250124"}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice.name", {"tool_choice": {"type": "tool", "name": "f"}}),
    ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "json_object"}}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ("output_config", {"output_config": "json"}),
    ("output_format.schema", {"output_format": {"type": "json_schema", "schema": None}}),
    ("output_format", {"output_format": OUTPUT, "output_config": {"format": OUTPUT}}),
    ("tool_choice.type", {"tool_choice": {"type": "required"}}),
    ("tool_choice.type", {"tools": [{"name": "f"}], "tool_choice": {"name": "f"}}),
    ("tool_choice.type", {"tool_choice": {}}),
    ("stop_sequences", {"stop_sequences": "a"}),
    ("stop_sequences.0", {"stop_sequences": [""]}),
    ("mcp_servers", {"mcp_servers": [{"url": "http://x"}]}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("max_completion_tokens", {"max_completion_tokens": 8}),
    ("stop", {"stop": "a"}),
    ("container", {"container": "c"}),
    ("context_management.edits.0", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("context_management.edits.0", {"context_management": {"edits": [{**CLEAR, "keep": {"value": 1}}]}}),
    ("context_management.edits.1", {"context_management": {"edits": [{**CLEAR, "keep": "all"}, CLEAR]}}),
]
NAMESPACE = {"type": "namespace", "name": "n"}
B_C, C = ({"type": "function", "name": name} for name in ("b.c", "c"))
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
RESPONSES: list[tuple[str, dict[str, Any]]] = [
    *COMMON,
    *REFUSED_BY_ALL,
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input", {"input": 3}),
    ("input", {"input": {"role": "user"}}),
    ("input", items(3)),
    ("input.0.role", items({"content": "x"})),
    ("input", items({"role": "tool", "content": "x"})),
    ("input", items({"role": "user", "content": 3})),
    ("input.0.content", items({"role": "user"})),
    ("input.0.content.0.type", items({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]})),
    ("input.0.content.0.type", items({"role": "user", "content": [{"type": "input_file"}]})),
    ("input.0.content.1.type", items({"role": "user", "content": [{"type": "text", "text": ""}, {"type": "x"}]})),
    ("input.0.content.0.text", items({"role": "user", "content": [{"type": "input_text"}]})),
    ("input.0.content.0.type", items({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]})),
    ("input", items({"role": "user", "content": [{"text": "x"}]})),
    ("input.0.type", items({"type": "item_referenc", "id": "x"})),
    ("input.0.id", items({"type": "item_reference"})),
    ("input.0.type", items({"type": "web_search_call", "id": "x"})),
    ("input.1.type", items(HI, {"type": "computer_call", "call_id": "x"})),
    ("input.0.call_id", items({**CALL, "call_id": None})),
    ("input.0.name", items({**CALL, "name": None})),
    ("input.0.arguments", items({**CALL, "arguments": None})),
    ("input", items({**CALL, "arguments": {}})),
    ("input.1.output", items(CALL, {"type": "function_call_output", "call_id": "a"})),
    ("input.1.call_id", items(CALL, {"type": "function_call_output", "output": "7"})),
    ("input", items(CALL, {"type": "function_call_output", "call_id": "a", "output": 7})),
    (
        "input.1.output.0.type",
        items(CALL, {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}),
    ),
    ("instructions", {"instructions": 3}),
    ("instructions", {"instructions": ["be brief"]}),
    ("previous_response_id", {"previous_response_id": 3}),
    ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ("tools.0.type", {"tools": [{"name": "f"}]}),
    ("tools.0.name", {"tools": [{"type": "function"}]}),
    ("tools.0.name", {"tools": [{"type": "namespace", "tools": []}]}),
    ("tools.0.tools.0.type", {"tools": [{**NAMESPACE, "tools": [{"type": "custom", "name": "f"}]}]}),
    ("tools.0.tools.0.type", {"tools": [{**NAMESPACE, "tools": [NAMESPACE]}]}),
    ("tools.0.name", {"tools": [{"type": "function", "name": 3}]}),
    ("tools.0.parameters", {"tools": [{"type": "function", "name": "f", "parameters": "{}"}]}),
    ("tool_choice", {"tool_choice": "any"}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "f"}}),
    ("tool_choice", {"tool_choice": {"type": "web_search"}}),
    ("tool_choice.mode", {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"function": "f"}]}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": ["f"]}]}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}] * 1001}}),
    ("tool_choice.tools", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("tool_choice", {"tool_choice": 3}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": "10"}),
    ("truncation", {"truncation": "none"}),
    ("truncation", {"truncation": True}),
    ("tools.1.tools.0.name", {"tools": [{**NAMESPACE, "tools": [B_C]}, {**NAMESPACE, "name": "n.b", "tools": [C]}]}),
    ("tools.1.tools.0.name", {"tools": [{**C, "name": "n.c"}, {**NAMESPACE, "tools": [C]}]}),
    ("tools.1.name", {"tools": [{**NAMESPACE, "tools": [C]}, {**C, "name": "n.c"}]}),
    ("text", {"text": "json"}),
    ("text.format.type", {"text": {"format": {}}}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "s"}}}),
    ("text.format", {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    ("background", {"background": True}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("max_tokens", {"max_tokens": 8}),
    ("stop", {"stop": "a"}),
    ("input", items({"type": "reasoning", "summary": "x"})),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "p"}}),
]
DIALECTS: dict[str, tuple[Dialect, dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "chat": (ChatCompletions(), {"messages": [HI], "model": "m"}, CHAT),
    "messages": (Messages(), {"messages": [HI], "model": "m", "max_tokens": 8}, MESSAGES),
    "responses": (Responses(), {"input": "hi", "model": "m"}, RESPONSES),
}


NOT_OBJECTS = [b"", b"{", b"[]", b"nul", b"\xff", b'"hi"', b"{} {}"]


def refused(dialect: Dialect, good: dict[str, Any], cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """(error, envelope) of each case, whose error names its field."""
    dialect.parse(json_bytes(good), ADDRESS)
    assert len(cases) >= 40
    errors = []
    for param, fields in cases:
        changed = {key: value for key, value in {**good, **fields}.items() if value is not None or key not in good}
        with pytest.raises(RequestError) as error:
            dialect.parse(json_bytes(changed), ADDRESS)
        assert (error.value.status, (error.value.param or "").startswith(param)) == (400, True), (fields, error.value)
        body = dialect.render_error(error.value)
        assert body["error"]["message"]
        errors.append((error.value, body))
    return errors


@pytest.mark.parametrize("name", DIALECTS)
def test_a_wrong_field_is_named_in_the_dialects_own_envelope(name):
    for error, body in refused(*DIALECTS[name]):
        assert body["error"]["type"] == "invalid_request_error"
        if name == "messages":
            assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
            assert body["error"]["message"].startswith(error.param or "")
        else:
            assert body["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("body", NOT_OBJECTS)
def test_a_body_that_is_no_object_is_an_error_of_the_dialect(name, body):
    dialect, _, _ = DIALECTS[name]
    with pytest.raises(RequestError) as error:
        dialect.parse(body, ADDRESS)
    assert dialect.render_error(error.value)["error"]["type"] == "invalid_request_error"
