"""Content of messages on the wire: the parts of all APIs, read to the project's, and Anthropic's blocks written back.

What a policy that reads text cannot take, an image above all, is refused with its place and its type.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from nemo_rl.data.messages import TEXT_TYPES
from nemo_rl.gateway.schema import Body, RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import Part, TextPart, ThinkingPart, ToolCall, ToolResult

RAW_ARGUMENTS = "raw_arguments"  # holds arguments that are no JSON object, the only form in Anthropic's API
SIGNATURE_BYTES = 32


class Block(Body):
    """A part of a content: a text in each API; thinking, a call or a result in Anthropic's."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None


Content = str | list[Block]


def read_parts(
    content: str | Sequence[Block] | None,
    where: str,
    kinds: Sequence[str] = TEXT_TYPES,
    *,
    separator: str = "\n",
) -> tuple[Part, ...]:
    """Return the parts of a content of which the request has the blocks at `where`; adjacent texts become one.

    Raises RequestError for blocks of another type than `kinds`, and for blocks that lack a field of their type.
    """
    if content is None or isinstance(content, str):
        return (TextPart(content),) if content else ()
    parts: list[Part] = []
    for i, block in enumerate(content):
        part = _read_part(block, f"{where}.{i}", kinds)
        if isinstance(part, TextPart) and parts and isinstance(before := parts[-1], TextPart):
            parts[-1] = TextPart(f"{before.text}{separator}{part.text}")
        elif part is not None:
            parts.append(part)
    return tuple(parts)


def read_text(content: str | Sequence[Block] | None, where: str) -> tuple[TextPart, ...]:
    """Return a content of text alone, as `read_parts` does."""
    return tuple(part for part in read_parts(content, where) if isinstance(part, TextPart))


def _read_part(block: Block, where: str, kinds: Sequence[str]) -> Part | None:
    if block.type not in kinds:
        text = f"{where}.type: content of type {block.type!r} is not supported: this policy reads text"
        raise make_unsupported_error(f"{where}.type", text)
    return _READERS.get(block.type, _read_text)(block, where)


def _read_text(block: Block, where: str) -> TextPart:
    if block.text is None:
        raise make_missing_error(f"{where}.text")
    return TextPart(block.text)


def _read_thinking(block: Block, where: str) -> ThinkingPart:
    if block.signature != _sign(block.thinking or ""):
        text = f"{where}.signature: not that of this thinking block"
        raise RequestError(400, text, param=f"{where}.signature")
    return ThinkingPart(block.thinking or "")


def _read_tool_use(block: Block, where: str) -> ToolCall:
    missing = next((name for name in ("id", "name", "input") if getattr(block, name) is None), None)
    if missing:
        raise make_missing_error(f"{where}.{missing}")
    arguments = block.input or {}
    is_raw = arguments.keys() == {RAW_ARGUMENTS}
    text = str(arguments[RAW_ARGUMENTS]) if is_raw else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(block.id or "", block.name or "", text)


def _read_tool_result(block: Block, where: str) -> ToolResult:
    if block.tool_use_id is None:
        raise make_missing_error(f"{where}.tool_use_id")
    return ToolResult(block.tool_use_id, read_text(block.content, f"{where}.content"))


_READERS: Mapping[str, Callable[[Block, str], Part | None]] = {
    "thinking": _read_thinking,
    "redacted_thinking": lambda block, where: None,
    "tool_use": _read_tool_use,
    "tool_result": _read_tool_result,
}


def write_block(part: Part) -> dict[str, Any]:
    """Return Anthropic's block of a part of a response; thinking is signed."""
    if isinstance(part, ThinkingPart):
        return {"type": "thinking", "thinking": part.text, "signature": _sign(part.text)}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments_object(part)}
    assert isinstance(part, TextPart)  # a policy gives no results
    return {"type": "text", "text": part.text}


def _sign(thinking: str) -> str:
    """Return the signature of a thinking block, by which one that was changed is told from one that was returned."""
    digest = blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=SIGNATURE_BYTES, person=b"nemo-rl")
    return base64.b64encode(digest.digest()).decode()


def _arguments_object(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as the object that Anthropic's API takes."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: call.arguments}
