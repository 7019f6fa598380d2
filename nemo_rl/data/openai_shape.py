"""Messages in the shape of OpenAI's chat completions, as servers, agents and chat templates take them."""

from typing import Any

from nemo_rl.types import Message, ToolCall


def to_openai_message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [to_openai_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    return body


def to_openai_tool_call(call: ToolCall) -> dict[str, Any]:
    """Its arguments are text."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
