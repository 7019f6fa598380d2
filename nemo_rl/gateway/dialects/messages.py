"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`. https://docs.anthropic.com/en/api/messages

Thinking is returned as signed blocks, which clients send back; a block whose thinking was modified is refused with 400,
as is a field that would change the sampled text. `cache_control` changes nothing here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from yarl import URL

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import CallAnswer, CallDelta, CallRequest, Forcing, StreamStart
from nemo_rl.gateway.dialects.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Content,
    ContentBlock,
    Turns,
    arguments_object,
    arguments_text,
    check_chosen,
    check_signature,
    make_format_guide,
    make_tool,
    make_tool_type_error,
    merge_texts,
    names_of,
    read_content,
    sign,
)
from nemo_rl.gateway.dialects.dialect import Dialect, EventStream, FindResponse, find_none, render_event
from nemo_rl.gateway.images import TEXT_ONLY, RequestImages
from nemo_rl.gateway.request_errors import RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import Guide, Message, Part, TextPart, ThinkingPart, ToolCall, ToolResult

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERROR_TYPES |= {429: "rate_limit_error"}  # other 4xx: invalid_request_error
IGNORED_FIELDS = frozenset({"metadata", "service_tier", "cache_control", "betas"})  # not logged
USER_BLOCKS = ("tool_result",)  # besides text and images
ASSISTANT_BLOCKS = ("thinking", "redacted_thinking", "tool_use")


class Block(ContentBlock):
    """A part of a content: text, an image, thinking, a tool call or a tool result."""

    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None

    def read(self, where: str, kinds: Sequence[str], images: RequestImages) -> Part | None:
        """Return the part, None for redacted thinking; raises RequestError unless it is content or of `kinds`."""
        if self.type not in kinds:
            return self.read_content(where, images)
        if self.type == "redacted_thinking":
            return None
        if self.type == "thinking":
            check_signature(self.signature, self.thinking or "", f"{where}.signature")
            return ThinkingPart(self.thinking or "")
        if self.type == "tool_result":
            call_id = self._required("tool_use_id", where)
            return ToolResult(call_id, read_content(self.content, f"{where}.content", images))
        call_id, name, arguments = (self._required(key, where) for key in ("id", "name", "input"))
        return ToolCall(call_id, name, arguments_text(arguments))

    def _required(self, name: str, where: str) -> Any:
        value = getattr(self, name)
        if value is None:
            raise make_missing_error(f"{where}.{name}")
        return value


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def read(self, where: str, images: RequestImages) -> tuple[Part, ...]:
        """Return the parts; raises RequestError for a block that the role cannot have."""
        if isinstance(self.content, str):
            return (TextPart(self.content),) if self.content else ()
        kinds, separator = (ASSISTANT_BLOCKS, "") if self.role == "assistant" else (USER_BLOCKS, "\n")
        parts = [block.read(f"{where}.{i}", kinds, images) for i, block in enumerate(self.content)]
        return merge_texts([part for part in parts if part is not None], separator)


class InputSchemaTool(Body):
    name: Annotated[str, Field(min_length=1)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def read(self, where: str) -> dict[str, Any]:
        """Return the tool as templates render it; raises RequestError for one that runs at Anthropic."""
        if self.type not in (None, "custom"):
            raise make_tool_type_error(self.type, where)
        return make_tool(self.name, self.description, self.input_schema)


class TypedChoice(Body):
    """The field `tool_choice`."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def forcing(self, tools: Sequence[Mapping[str, Any]]) -> Forcing | None:
        """Return the demand, if any; raises RequestError for a tool that the request does not declare."""
        if self.type == "tool":
            check_chosen([self.name], tools, "tool_choice.name")
            return Forcing("tool_choice.type", (self.name or "",))
        return Forcing("tool_choice.type", names_of(tools)) if self.type == "any" else None


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def guide(self, field: str) -> Guide | None:
        """Return the constraint that `field` asks for; raises RequestError without a schema."""
        return make_format_guide(self.type, self.schema_, f"{field}.schema")


class OutputConfig(Body):
    format: JsonFormat | None = None
    effort: str | None = None


class ContextEdit(Body):
    type: str
    keep: str | dict[str, Any] | None = None


class ContextManagement(Body):
    """Edits that the server would make to a conversation; only one that keeps everything is accepted."""

    edits: list[ContextEdit] = Field(default_factory=list)

    def reject_edits(self) -> None:
        for i, edit in enumerate(self.edits):
            if not edit.type.startswith("clear_thinking") or edit.keep != "all":
                where = f"context_management.edits.{i}"
                raise make_unsupported_error(where, f"{where}: the past of a session is never edited")


class MessagesRequest(Body):
    """The body of POST .../messages, and without `max_tokens` that of .../messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    system: Content | None = None
    tools: Annotated[list[InputSchemaTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: TypedChoice | None = None
    context_management: ContextManagement | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # its name in the beta of structured outputs
    stream: bool | None = None

    def to_call(self, images: RequestImages) -> CallRequest:
        """Return the neutral call; raises RequestError for unsupported fields."""
        self.reject_fields(format_field="output_config.format")
        if self.context_management is not None:
            self.context_management.reject_edits()
        system = () if self.system is None else (Message("system", read_content(self.system, "system")),)
        tools = tuple(tool.read(f"tools.{i}") for i, tool in enumerate(self.tools or ()))
        choice = self.tool_choice or TypedChoice(type="auto")
        forcing = choice.forcing(tools)
        guide, guide_field = self._guide()
        has_effort = self.output_config is not None and self.output_config.effort is not None
        ignored = self.extra_fields().keys() | ({"output_config.effort"} if has_effort else set())
        return CallRequest(
            (*system, *_to_messages(self.messages, images)),
            tools,
            parses_tool_calls=choice.type != "none",
            allows_parallel_calls=not choice.disable_parallel_tool_use,
            forcing=forcing,
            guide=guide,
            guide_field=guide_field,
            model=self.model,
            max_tokens=self.max_tokens,
            stop_strings=tuple(self.stop_sequences or ()),
            stream=bool(self.stream),
            ignored_fields=frozenset(ignored - IGNORED_FIELDS),
            id_prefix="msg_",
        )

    def _guide(self) -> tuple[Guide | None, str]:
        """Return the constraint, if any, and the field that asks for it; raises RequestError for two."""
        if self.output_config is None or self.output_config.format is None:
            guide = None if self.output_format is None else self.output_format.guide("output_format")
            return guide, "output_format"
        if self.output_format is not None:
            text = "output_format: excludes output_config.format"
            raise RequestError(400, text, param="output_format")
        return self.output_config.format.guide("output_config.format"), "output_config.format"


def _to_messages(said: Sequence[Turn], images: RequestImages) -> tuple[Message, ...]:
    turns = Turns()
    for i, turn in enumerate(said):
        turns.add(
            turn.role, turn.read(f"messages.{i}.content", images if turn.role == "user" else TEXT_ONLY), begins=True
        )
    return turns.messages_to_answer("messages")


class Messages(Dialect):
    """The dialect `/v1/messages`."""

    paths = ("/messages",)
    count_paths = ("/messages/count_tokens",)
    key_headers = ("X-API-Key",)

    def parse(
        self,
        body: bytes,
        address: URL,
        find_response: FindResponse = find_none,
        images: RequestImages = TEXT_ONLY,
    ) -> CallRequest:
        parsed = MessagesRequest.from_json(body)
        if parsed.max_tokens is None:
            raise make_missing_error("max_tokens")
        return parsed.to_call(images)

    def parse_count(self, body: bytes, images: RequestImages = TEXT_ONLY) -> CallRequest:
        return MessagesRequest.from_json(body).to_call(images)

    def render_count(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}

    def render(self, call: CallRequest, answer: CallAnswer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `message` object."""
        content = [_write_block(part) for part in answer.response.message.parts if part != ThinkingPart("")]
        head = _head(answer.completion_id, answer.model, answer.num_prompt_tokens)
        usage = {**head["usage"], "output_tokens": answer.num_sampled_tokens}
        return {**head, "content": content, **_stop(answer), "usage": usage}

    def open_stream(self, call: CallRequest) -> "BlockStream":
        return BlockStream()

    def render_error(self, error: RequestError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.named_message()}, "request_id": None}


class BlockStream(EventStream):
    """Events of content blocks, each started, filled with deltas and stopped."""

    def __init__(self) -> None:
        super().__init__()
        self._index = -1

    def render_start(self, start: StreamStart) -> bytes:
        head = _head(start.completion_id, start.model, start.num_prompt_tokens)
        return _event("message_start", message={**head, "content": [], "stop_reason": None, "stop_sequence": None})

    def render_text(self, kind: str, text: str) -> bytes:
        return self._delta({"type": f"{kind}_delta", kind: text})

    def render_call(self, delta: CallDelta) -> bytes:
        block = _write_block(delta.call)
        arguments = json.dumps(block["input"], ensure_ascii=False)
        started = self._start({**block, "input": {}})
        return started + self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._stop()

    def open_item(self, kind: str) -> bytes:
        return self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})

    def close_item(self, kind: str, text: str) -> bytes:
        if kind == "text":
            return self._stop()
        return self._delta({"type": "signature_delta", "signature": sign(text)}) + self._stop()

    def render_end(self, answer: CallAnswer, encoder: ChatEncoder) -> bytes:
        usage = {"output_tokens": answer.num_sampled_tokens}
        return self.close() + _event("message_delta", delta=_stop(answer), usage=usage) + _event("message_stop")

    def render_failure(self, error: RequestError) -> bytes:
        return _event("error", error=Messages().render_error(error)["error"])

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _write_block(part: Part) -> dict[str, Any]:
    """Return the block of a part of a response; thinking is signed."""
    if isinstance(part, ThinkingPart):
        return {"type": "thinking", "thinking": part.text, "signature": sign(part.text)}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments_object(part)}
    assert isinstance(part, TextPart)  # a policy's response has no tool results
    return {"type": "text", "text": part.text}


def _head(completion_id: str, model: str, num_prompt_tokens: int) -> dict[str, Any]:
    usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
    usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"id": completion_id, "type": "message", "role": "assistant", "model": model, "usage": usage}


def _stop(answer: CallAnswer) -> dict[str, Any]:
    reason = "tool_use" if answer.response.message.tool_calls else "end_turn"
    if answer.response.stop_string is not None:
        reason = "stop_sequence"
    if answer.is_truncated:
        reason = "max_tokens" if answer.completion.token_ids else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": answer.response.stop_string}


def _event(kind: str, **fields: Any) -> bytes:
    return render_event({"type": kind, **fields}, kind)
