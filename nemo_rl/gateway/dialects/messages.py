"""Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`. https://docs.anthropic.com/en/api/messages

Thinking is returned as signed blocks, which clients send back; a block with another signature is refused.
`cache_control` changes nothing here. What would change the sampled text is refused with 400.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.messages import TEXT_TYPES
from nemo_rl.gateway.calls import Answer, CallRequest
from nemo_rl.gateway.dialects.common import DeltaEvents, extra_fields, reject_fields, render_event
from nemo_rl.gateway.dialects.content import Content, Turns, read_parts, read_text, write_block
from nemo_rl.gateway.dialects.formats import FormattedRequest
from nemo_rl.gateway.dialects.tools import MAX_TOOLS, InputSchemaTool, TypedChoice
from nemo_rl.gateway.schema import Body, RequestError, make_missing_error, make_unsupported_error, parse_body
from nemo_rl.gateway.streaming import CallDelta, StreamStart
from nemo_rl.types import Message, ThinkingPart

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
ERROR_TYPES |= {429: "rate_limit_error"}  # other 4xx: invalid_request_error
IGNORED_FIELDS = frozenset({"metadata", "service_tier", "cache_control", "betas"})  # silently
USER_BLOCKS = (*TEXT_TYPES, "tool_result")
ASSISTANT_BLOCKS = (*TEXT_TYPES, "thinking", "redacted_thinking", "tool_use")


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


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


class MessagesRequest(FormattedRequest):
    """The body of POST .../messages; `max_tokens` is required there, and absent where tokens are only counted."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    system: Content | None = None
    tools: Annotated[list[InputSchemaTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: TypedChoice | None = None
    context_management: ContextManagement | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None

    def to_call(self) -> CallRequest:
        """Return the neutral call; raises RequestError for what is not supported."""
        reject_fields(self, format_field="output_config.format")
        if self.context_management is not None:
            self.context_management.reject_edits()
        system = () if self.system is None else (Message("system", read_text(self.system, "system")),)
        tools = tuple(tool.read(f"tools.{i}") for i, tool in enumerate(self.tools or ()))
        asked = self.tool_choice or TypedChoice(type="auto")
        choice = asked.read(tools)
        guide, guide_field = self.guide()
        has_effort = self.output_config is not None and self.output_config.effort is not None
        ignored = extra_fields(self).keys() | ({"output_config.effort"} if has_effort else set())
        return CallRequest(
            (*system, *_to_messages(self.messages)),
            tools,
            parses_tool_calls=choice.parses_calls,
            allows_parallel_calls=not asked.disable_parallel_tool_use,
            forcing=choice.forcing,
            guide=guide,
            guide_field=guide_field,
            model=self.model,
            max_tokens=self.max_tokens,
            stop_strings=tuple(self.stop_sequences or ()),
            stream=bool(self.stream),
            ignored_fields=frozenset(ignored - IGNORED_FIELDS),
            id_prefix="msg_",
        )


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

    def render_count(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}

    def render(self, call: CallRequest, answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `message` object."""
        content = [write_block(part) for part in answer.response.message.parts if part != ThinkingPart("")]
        head = _head(answer.completion_id, answer.model, answer.num_prompt_tokens)
        usage = {**head["usage"], "output_tokens": answer.num_sampled_tokens}
        return {**head, "content": content, **_stop(answer), "usage": usage}

    def open_stream(self, call: CallRequest) -> "BlockStream":
        return BlockStream()

    def render_error(self, error: RequestError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.named_message()}, "request_id": None}


class BlockStream(DeltaEvents):
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
        block = write_block(delta.call)
        arguments = json.dumps(block["input"], ensure_ascii=False)
        started = self._start({**block, "input": {}})
        return started + self._delta({"type": "input_json_delta", "partial_json": arguments}) + self._stop()

    def open_item(self, kind: str) -> bytes:
        return self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})

    def close_item(self, kind: str, text: str) -> bytes:
        if kind == "text":
            return self._stop()
        signature = write_block(ThinkingPart(text))["signature"]
        return self._delta({"type": "signature_delta", "signature": signature}) + self._stop()

    def render_end(self, answer: Answer, encoder: ChatEncoder) -> bytes:
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


def _to_messages(said: Sequence[Turn]) -> tuple[Message, ...]:
    turns = Turns()
    for i, turn in enumerate(said):
        kinds, separator = (ASSISTANT_BLOCKS, "") if turn.role == "assistant" else (USER_BLOCKS, "\n")
        parts = read_parts(turn.content, f"messages.{i}.content", kinds, separator=separator)
        turns.add(turn.role, parts, begins=True)
    return turns.messages_to_answer("messages")


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


def _event(kind: str, **fields: Any) -> bytes:
    return render_event({"type": kind, **fields}, kind)
