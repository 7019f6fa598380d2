import json
from typing import Any

import pytest

from nemo_rl.gateway.dialects.chat_completions import ChatMessage, ChatRequest
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.types import Message, ToolCall


def message(**fields: Any) -> Message:
    return ChatMessage.model_validate(fields).message()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"role": "developer", "content": "be brief"}, Message("system", "be brief")),
        ({"role": "assistant"}, Message("assistant", "")),
        ({"role": "assistant", "content": None, "refusal": None, "audio": None}, Message("assistant", "")),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            Message("user", "a\nb"),
        ),
        ({"role": "tool", "content": "7", "tool_call_id": "x"}, Message("tool", "7", tool_call_id="x")),
        (
            {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": {"a": 1}}}]},
            Message("assistant", "", (ToolCall("x", "f", '{"a": 1}'),)),
        ),
    ],
)
def test_messages_are_read_as_templates_see_them(fields, expected):
    assert message(**fields) == expected


def test_old_function_calls_are_refused():
    with pytest.raises(RequestError, match="tool_calls are"):
        message(role="assistant", function_call={"name": "f", "arguments": "{}"})


def test_tools_reach_the_template_as_the_client_wrote_them():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": None}, "strict": False}}
    asked = ChatRequest.from_json(json.dumps({"messages": [{"role": "user"}], "tools": [tool]}).encode())
    assert json.dumps(asked.to_call().tools) == json.dumps([tool])


def test_an_error_names_the_first_wrong_field():
    with pytest.raises(RequestError, match="should be a valid string") as error:
        ChatRequest.from_json(b'{"messages": [{"role": "user", "content": "a"}], "model": 3}')
    assert (error.value.status, error.value.param) == (400, "model")
