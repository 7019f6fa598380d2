"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`. https://docs.anthropic.com/en/api/messages

Thinking is returned as signed blocks, which clients send back; a block with another signature is refused.
`cache_control` changes nothing here. What would change the sampled text is refused with 400.
"""

import base64
import json
from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import Answer, CallRequest
from nemo_rl.gateway.dialects.common import (
    MAX_TOOLS,
    ResponseFormat,
    check_chosen,
    extra_fields,
    join_text,
    part_text,
    reject_fields,
    render_event,
)
from nemo_rl.gateway.schema import Body, RequestError, make_missing_error, make_unsupported_error, parse_body
from nemo_rl.gateway.streaming import CallDelta, Delta, ReasoningDelta, StreamStart, TextDelta
from nemo_rl.types import Guide, Message, ToolCall

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERROR_TYPES |= {429: "rate_limit_error"}  # other 4xx: invalid_request_error
REJECTED_FIELDS = frozenset({"mcp_servers", "container"})
IGNORED_FIELDS = frozenset({"metadata", "service_tier", "cache_control", "betas"})  # silently
RAW_ARGUMENTS = "raw_arguments"  # holds arguments that are no JSON object, whose place in the API only an object takes
SIGNATURE_BYTES = 32


class Block(Body):
    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(Body):
    name: Annotated[str, Field(min_length=1)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoiceParam(Body):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(ResponseFormat):
    type: Literal["json_schema"]


class OutputConfig(Body):
    format: JsonFormat | None = None
    effort: str | None = None


class ContextEdit(Body):
    type: str
    keep: str | dict[str, Any] | None = None


class ContextManagement(Body):
    """Edits that the server would make to a conversation; one that keeps everything is the only one accepted."""

    edits: list[ContextEdit] = Field(default_factory=list)

    def reject_edits(self) -> None:
        for i, edit in enumerate(self.edits):
            if not edit.type.startswith("clear_thinking") or edit.keep != "all":
                where = f"context_management.edits.{i}"
                raise make_unsupported_error(where, f"{where}: the past of a session is never edited")


class MessagesRequest(Body):
    """The body of POST .../messages; `max_tokens` is required there, and absent where tokens are only counted."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    system: str | list[Block] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    output_format: JsonFormat | None = None  # its name in the beta of structured outputs
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None

    def to_call(self) -> CallRequest:
        """Return the neutral call; raises RequestError for what is not supported."""
        extra = extra_fields(self)
        reject_fields(extra, REJECTED_FIELDS)
        if self.context_management is not None:
            self.context_management.reject_edits()
        if self.messages[-1].role == "assistant":
            text = "messages: the last one is the assistant's; prefill is not supported"
            raise make_unsupported_error("messages", text)
        system = () if self.system is None else (Message("system", join_text(self.system, "system")),)
        turns = [m for i, turn in enumerate(self.messages) for m in _to_messages(turn, f"messages.{i}.content")]
        tools = tuple(_to_tool(tool, f"tools.{i}") for i, tool in enumerate(self.tools or ()))
        choice = self.tool_choice or ToolChoiceParam(type="auto")
        if choice.type == "tool":
            check_chosen([choice.name], [tool["function"]["name"] for tool in tools], "tool_choice.name")
        guide, guide_field = self._guide()
        return CallRequest(
            (*system, *turns),
            tools,
            parses_tool_calls=choice.type != "none",
            forcing_field="tool_choice.type" if choice.type in ("any", "tool") else None,
            guide=guide,
            guide_field=guide_field,
            model=self.model,
            max_tokens=self.max_tokens,
            stop_strings=tuple(self.stop_sequences or ()),
            stream=bool(self.stream),
            ignored_fields=frozenset(extra.keys() - IGNORED_FIELDS) | self._unheeded(),
            id_prefix="msg_",
        )

    def _unheeded(self) -> set[str]:
        """Return the parts of known fields that the policy does not heed."""
        is_serial = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
        has_effort = self.output_config is not None and self.output_config.effort is not None
        serial = {"tool_choice.disable_parallel_tool_use"} if is_serial else set()
        return serial | ({"output_config.effort"} if has_effort else set())

    def _guide(self) -> tuple[Guide | None, str]:
        """Return what the response must match, and the field that says so; raises RequestError for two."""
        if self.output_config is None or self.output_config.format is None:
            guide = None if self.output_format is None else self.output_format.guide("output_format")
            return guide, "output_format"
        if self.output_format is not None:
            text = "output_format: excludes output_config.format"
            raise RequestError(400, text, param="output_format")
        return self.output_config.format.guide("output_config.format"), "output_config.format"


class Messages:
    """The dialect `/v1/messages`."""

    def parse(self, body: bytes) -> CallRequest:
        parsed = parse_body(MessagesRequest, body)
        if parsed.max_tokens is None:
            raise make_missing_error("max_tokens")
        return parsed.to_call()

    def parse_count(self, body: bytes) -> CallRequest:
        """Return the call whose tokens are to be counted."""
        return parse_body(MessagesRequest, body).to_call()

    def render(self, call: CallRequest, answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `message` object."""
        response = answer.response
        content: list[dict[str, Any]] = []
        if response.reasoning:
            signature = sign(response.reasoning)
            content.append({"type": "thinking", "thinking": response.reasoning, "signature": signature})
        if response.message.content:
            content.append({"type": "text", "text": response.message.content})
        content += [_tool_use(tool_call, _read_input(tool_call)) for tool_call in response.message.tool_calls]
        head = _head(answer.completion_id, answer.model, len(answer.prompt_token_ids))
        usage = {**head["usage"], "output_tokens": len(answer.completion.token_ids)}
        return {**head, "content": content, **_stop(answer), "usage": usage}

    def open_stream(self, call: CallRequest) -> "BlockStream":
        return BlockStream()

    def render_error(self, error: RequestError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        text = str(error)
        if error.param is not None and not text.startswith(error.param):
            text = f"{error.param}: {text}"
        return {"type": "error", "error": {"type": kind, "message": text}, "request_id": None}


class BlockStream:
    """Events of content blocks, each started, filled with deltas and stopped."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None  # the type of the open block
        self._thinking = ""

    def render_delta(self, delta: Delta) -> bytes:
        if isinstance(delta, StreamStart):
            head = _head(delta.completion_id, delta.model, delta.num_prompt_tokens)
            return _event("message_start", message={**head, "content": [], "stop_reason": None, "stop_sequence": None})
        if isinstance(delta, ReasoningDelta):
            self._thinking += delta.text
            started = self._start({"type": "thinking", "thinking": "", "signature": ""})
            return started + self._delta({"type": "thinking_delta", "thinking": delta.text})
        if isinstance(delta, TextDelta):
            return self._start({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": delta.text})
        return self._tool_use(delta)

    def render_end(self, answer: Answer, encoder: ChatEncoder) -> bytes:
        usage = {"output_tokens": len(answer.completion.token_ids)}
        return self._stop() + _event("message_delta", delta=_stop(answer), usage=usage) + _event("message_stop")

    def render_failure(self, error: RequestError) -> bytes:
        return _event("error", error=Messages().render_error(error)["error"])

    def _tool_use(self, delta: CallDelta) -> bytes:
        arguments = json.dumps(_read_input(delta.call), ensure_ascii=False)
        events = self._stop() + self._start(_tool_use(delta.call, {}))
        return events + self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._stop()

    def _start(self, block: dict[str, Any]) -> bytes:
        """Start a block, unless one of its type is open."""
        if self._open == block["type"]:
            return b""
        stopped = self._stop()
        self._open = block["type"]
        self._index += 1
        return stopped + _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        is_thinking, self._open = self._open == "thinking", None
        signed = self._delta({"type": "signature_delta", "signature": sign(self._thinking)}) if is_thinking else b""
        self._thinking = ""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def sign(thinking: str) -> str:
    """Return the signature of a thinking block, by which one that was changed is told from one that was returned."""
    digest = blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=SIGNATURE_BYTES, person=b"nemo-rl")
    return base64.b64encode(digest.digest()).decode()


def _to_messages(turn: Turn, where: str) -> list[Message]:
    """Return a turn as messages: a tool's results are messages of their own, before and after the user's text."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    if turn.role == "assistant":
        return [_to_assistant_message(turn.content, where)]
    messages: list[Message] = []
    texts: list[Block] = []
    for i, block in enumerate(turn.content):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if block.tool_use_id is None:
            raise make_missing_error(f"{where}.{i}.tool_use_id")
        if texts:
            messages.append(Message(turn.role, join_text(texts, where)))
            texts = []
        result = join_text(block.content, f"{where}.{i}.content")
        messages.append(Message("tool", result, tool_call_id=block.tool_use_id))
    return [*messages, Message(turn.role, join_text(texts, where))] if texts or not messages else messages


def _to_assistant_message(blocks: list[Block], where: str) -> Message:
    calls = []
    texts = []
    for i, block in enumerate(blocks):
        if block.type == "tool_use":
            missing = next((name for name in ("id", "name", "input") if getattr(block, name) is None), None)
            if missing:
                raise make_missing_error(f"{where}.{i}.{missing}")
            arguments = block.input or {}
            is_raw = arguments.keys() == {RAW_ARGUMENTS}
            text = str(arguments[RAW_ARGUMENTS]) if is_raw else json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(block.id or "", block.name or "", text))
        elif block.type == "thinking":
            if block.signature != sign(block.thinking or ""):
                text = f"{where}.{i}.signature: not that of this thinking block"
                raise RequestError(400, text, param=f"{where}.{i}.signature")
        elif block.type != "redacted_thinking":
            texts.append(part_text(block, f"{where}.{i}"))
    return Message("assistant", "".join(texts), tuple(calls))


def _to_tool(tool: ToolParam, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise make_unsupported_error(f"{where}.type", f"{where}.type: tools of type {tool.type!r} are not supported")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema or {"type": "object"}}}


def _head(completion_id: str, model: str, num_prompt_tokens: int) -> dict[str, Any]:
    usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
    usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"id": completion_id, "type": "message", "role": "assistant", "model": model, "usage": usage}


def _stop(answer: Answer) -> dict[str, Any]:
    reason = "tool_use" if answer.response.message.tool_calls else "end_turn"
    if answer.response.stop_string is not None:
        reason = "stop_sequence"
    if answer.is_truncated:
        reason = "max_tokens" if answer.completion.token_ids else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": answer.response.stop_string}


def _tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _read_input(call: ToolCall) -> dict[str, Any]:
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: call.arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return render_event({"type": kind, **fields}, kind)
