"""Messages as JSON: OpenAI's chat form, which rows and programs use, and the form of this project's own records.

A plain string is a valid content everywhere. gateway/dialects/ reads the bodies of the gateway's APIs.
"""

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from nemo_rl.data.images import IMAGE_TYPES, ImageReader, to_data_url
from nemo_rl.errors import DataError
from nemo_rl.types import PART_TYPES, ImagePart, Message, Part, Role, TextPart, ThinkingPart, ToolCall, ToolResult

TEXT_TYPES = ("text", "input_text", "output_text")  # types of text parts in OpenAI's and Anthropic's APIs
_TYPE_NAMES = {part_type: name for name, part_type in PART_TYPES.items()}


def to_image_url(image: ImagePart) -> dict[str, Any]:
    """Return an image as a part of an OpenAI message."""
    return {"type": "image_url", "image_url": {"url": to_data_url(image)}}


def to_openai_message(
    message: Message,
    *,
    as_parts: bool = False,
    write_image: Callable[[ImagePart], dict[str, Any]] = to_image_url,
) -> dict[str, Any]:
    """Return a message in OpenAI's shape; thinking is `reasoning_content`, as chat templates and servers expect it.

    The content is a text; a list of parts if there are images, or with `as_parts`.
    """
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if as_parts or message.images:
        contents = [part.content if isinstance(part, ToolResult) else (part,) for part in message.parts]
        body["content"] = [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else write_image(part)
            for content in contents
            for part in content
            if isinstance(part, TextPart | ImagePart)
        ]
    if (thinking := message.thinking) is not None:
        body["reasoning_content"] = thinking
    if calls := message.tool_calls:
        body["tool_calls"] = [to_openai_tool_call(call) for call in calls]
    if (call_id := message.tool_call_id) is not None:
        body["tool_call_id"] = call_id
    return body


def to_openai_tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's shape; its arguments are text."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def parse_message(item: Any, where: str = "message", *, images: ImageReader | None = None) -> Message:
    """Parse a message in OpenAI's shape; `images` reads its images, which are refused without it.

    An assistant's `reasoning_content` becomes thinking before its content, as `to_openai_message` writes it.

    Raises DataError, with the path below `where`, for an unknown role, content that the policy cannot read, a call
    without a name, and thinking, an image or an answered call in a message whose role cannot have it.
    """
    if not isinstance(item, Mapping) or item.get("role") not in get_args(Role):
        raise DataError(f"{where}: {item!r} is not a message with a role of {', '.join(get_args(Role))}")
    role, calls = item["role"], _list_at(item, "tool_calls", where)
    calls = tuple(_parse_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
    call_id = item.get("tool_call_id")
    if call_id and role != "tool":
        raise DataError(
            f"{where}.tool_call_id: {call_id!r:.80} in a message of role {role}; only a tool answers a call"
        )
    content = parse_content(item.get("content"), f"{where}.content", images=images)
    has_images = any(isinstance(part, ImagePart) for part in content)
    if has_images and role not in ("user", "tool"):
        raise DataError(f"{where}.content: an image in a message of role {role}; allowed: user and tool")
    has_thinking = any(isinstance(part, ThinkingPart) for part in content)
    if has_thinking and role != "assistant":
        raise DataError(f"{where}.content: thinking in a message of role {role}; only the assistant thinks")
    reasoning = _parse_reasoning(item, where, has_thinking=has_thinking)
    if reasoning or has_thinking:
        return Message("assistant", (*reasoning, *content), calls)
    if has_images:
        return Message(role, content, calls, call_id if role == "tool" else None)
    text = "".join(part.text for part in content if isinstance(part, TextPart))
    return Message(role, text, calls, call_id if role == "tool" else None)


def parse_messages(row: Mapping[str, Any], *, images: ImageReader | None = None) -> tuple[Message, ...]:
    """Parse a row's `messages`; raises DataError with the path of what is no message, and for too many images."""
    if not isinstance(row["messages"], list | tuple):
        raise DataError(f"messages is {row['messages']!r:.80}, not a list of messages")
    if images is not None:
        contents = (item.get("content") if isinstance(item, Mapping) else None for item in row["messages"])
        check_image_count(contents, images.limits.max_count)
    return tuple(parse_message(item, f"messages[{i}]", images=images) for i, item in enumerate(row["messages"]))


def check_image_count(contents: Iterable[Any], limit: int) -> None:
    """Raise DataError for more images in messages than a row may have, before any of them is read."""
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    count = sum(1 for part in parts if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES)
    if count > limit:
        raise DataError(f"messages have {count} images; allowed: images.max_count = {limit}")


def parse_tools(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a row's `tools`, OpenAI's tool schemas; raises DataError for one without a function's name."""
    tools = _list_at(row, "tools", "")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            example = '{"type": "function", "function": {"name": ...}}'
            raise DataError(f"tools[{index}] is {tool!r:.80}, without a function's name; allowed: {example}")
    return tuple(tools)


def _list_at(item: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    value = item.get(name)
    if value is not None and not isinstance(value, list | tuple):
        raise DataError(f"{where}.{name} is {value!r:.80}, not a list".lstrip("."))
    return value or ()


def check_text(text: str, where: str) -> str:
    """Return the text; raises DataError for half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"{where} has half a surrogate pair, {half}, at character {error.start}") from error
    return text


def _parse_reasoning(item: Mapping[str, Any], where: str, *, has_thinking: bool) -> tuple[ThinkingPart, ...]:
    reasoning, where = item.get("reasoning_content"), f"{where}.reasoning_content"
    if reasoning is None or (reasoning == "" and (has_thinking or item["role"] != "assistant")):
        return ()  # an empty cell of a table's column
    if item["role"] != "assistant":
        raise DataError(f"{where}: thinking in a message of role {item['role']}; only the assistant thinks")
    if not isinstance(reasoning, str):
        raise DataError(f"{where} is {reasoning!r:.80}, not a text")
    if has_thinking:
        raise DataError(f"{where}: the content has parts of type thinking too; give one of both")
    return (ThinkingPart(reasoning),)


def parse_content(
    content: Any, where: str = "content", *, images: ImageReader | None = None
) -> tuple[TextPart | ImagePart | ThinkingPart, ...]:
    """Parse a message's content: a text, or a list of parts of type text or thinking, or with `images` an image.

    Raises DataError, with the part's index and type, for audio, video, files and all other types.
    """
    if content is None or isinstance(content, str):
        return (TextPart(check_text(content, where)),) if content else ()
    if not isinstance(content, Sequence):
        raise DataError(f"{where} is {content!r:.80}, not a text or a list of parts")
    return tuple(_parse_part(part, f"{where}[{i}]", images) for i, part in enumerate(content))


def _parse_part(part: Any, where: str, images: ImageReader | None) -> TextPart | ImagePart | ThinkingPart:
    if not isinstance(part, Mapping):
        raise DataError(f"{where} is {part!r:.80}, not an object with type and text")
    kind = part.get("type", "text")
    if kind in IMAGE_TYPES and images is not None:
        return images.read_part(part, where)
    if kind not in (*TEXT_TYPES, "thinking"):
        reads = "text" if images is None else "text and images"
        raise DataError(f"{where} is a part of type {kind!r}: this policy reads {reads}")
    text = part.get("thinking", part.get("text")) if kind == "thinking" else part.get("text")
    if not isinstance(text, str):
        raise DataError(f"{where} has no text: {part!r:.80}")
    check_text(text, where)
    return ThinkingPart(text) if kind == "thinking" else TextPart(text)


def _parse_tool_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has no function.name")
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call_id = call.get("id") or ""
    if not isinstance(call_id, str):
        raise DataError(f"{where}.id is {call_id!r:.80}, not a text")
    return ToolCall(call_id, function["name"], text)


def to_record(message: Message, *, keeps_files: bool = False) -> dict[str, Any]:
    """Return a message as records hold it: role, content, calls, and its parts if these do not determine them.

    Images are digests; their files too only if kept.
    """
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if calls := message.tool_calls:
        row["tool_calls"] = [asdict(call) for call in calls]
    if (call_id := message.tool_call_id) is not None:
        row["tool_call_id"] = call_id
    if message.parts != Message(message.role, row["content"], calls, call_id).parts:
        row["parts"] = [_part_to_dict(part, keeps_files) for part in message.parts]
    return row


def parse_record(row: Mapping[str, Any]) -> Message:
    """Parse a row of `to_record`; raises KeyError, TypeError or ValueError if the row is not a message."""
    if (parts := row.get("parts")) is not None:
        return Message(row["role"], tuple(_part_from_dict(part) for part in parts))
    calls = tuple(ToolCall(**call) for call in row.get("tool_calls") or ())
    return Message(row["role"], row["content"], calls, row.get("tool_call_id"))


def _part_to_dict(part: Part, keeps_files: bool) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        file = {"file": base64.b64encode(part.file).decode()} if keeps_files else {}
        return {"type": _TYPE_NAMES[ImagePart], "digest": part.digest, **file}
    fields = asdict(part)
    if isinstance(part, ToolResult):
        fields["content"] = [_part_to_dict(each, keeps_files) for each in part.content]
    return {"type": _TYPE_NAMES[type(part)], **fields}


def _part_from_dict(fields: Mapping[str, Any]) -> Part:
    kind, values = fields["type"], {name: value for name, value in fields.items() if name != "type"}
    if kind == "tool_result":
        values["content"] = tuple(_part_from_dict(each) for each in values["content"])
    if "file" in values:
        values["file"] = base64.b64decode(values["file"])
    return PART_TYPES[kind](**values)
