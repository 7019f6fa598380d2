"""OpenAI's chat completions: `/v1/chat/completions`. https://platform.openai.com/docs/api-reference/chat

The run decides how tokens are sampled: a client's sampling parameters are ignored, and a field that needs another
policy is refused with 400. `nemo_rl_session` in `metadata` names the session of a client whose base URL is fixed;
echoed token ids on assistant messages identify a chain without a session.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from yarl import URL

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.messages import to_openai_tool_call
from nemo_rl.gateway.calls import CallAnswer, CallDelta, CallRequest, StreamStart
from nemo_rl.gateway.dialects.bodies import MAX_MESSAGES, MAX_TOOLS, Body, Content, make_format_guide, read_content
from nemo_rl.gateway.dialects.dialect import Dialect, EventStream, FindResponse, find_none, render_event
from nemo_rl.gateway.dialects.openai import OpenAIRequest
from nemo_rl.gateway.images import TEXT_ONLY, RequestImages
from nemo_rl.gateway.request_errors import RequestError, make_unsupported_error
from nemo_rl.gateway.sessions import Echo
from nemo_rl.types import Guide, Message, Role, ThinkingPart, ToolCall

IGNORED_FIELDS = frozenset(  # not logged: they change nothing here
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "return_tokens_as_token_ids"}
)
FORMAT_FIELD = "response_format"
SESSION_FIELD = "nemo_rl_session"  # in `metadata`
MAX_STOP_STRINGS = 16


class FunctionName(Body):
    name: Annotated[str, Field(min_length=1)]


class ChatTool(Body):
    """A declared function, which templates render as it is written."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ChatToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def read(self) -> ToolCall:
        arguments = self.function.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(self.id, self.function.name, text)


class ChatMessage(Body):
    """A message; an assistant's may carry the tokens of the call that it came from."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None

    def message(self, where: str = "messages", images: RequestImages = TEXT_ONLY) -> Message:
        """Return the message as templates see it; raises RequestError for audio and legacy function calls."""
        if (self.model_extra or {}).get("function_call"):
            raise make_unsupported_error(f"{where}.function_call", "function_call is not supported; tool_calls are")
        role: Role = "system" if self.role == "developer" else self.role
        calls = tuple(call.read() for call in self.tool_calls or ())
        is_thinking = role == "assistant" and self.reasoning_content is not None
        thinking = (ThinkingPart(self.reasoning_content or ""),) if is_thinking else ()
        call_id = self.tool_call_id if role == "tool" else None  # other roles do not answer calls
        content = read_content(self.content, f"{where}.content", images if role in ("user", "tool") else TEXT_ONLY)
        return Message(role, (*thinking, *content), calls, call_id)

    def echo(self) -> Echo | None:
        """Return the echoed tokens, if any; raises RequestError for numbers that cannot be token ids."""
        if self.role != "assistant" or self.prompt_token_ids is None or self.generation_token_ids is None:
            return None
        for ids in (self.prompt_token_ids, self.generation_token_ids):
            if ids and not 0 <= min(ids) <= max(ids) < 2**31:
                raise RequestError(400, "token ids must be in 0..2**31", param="messages")
        return Echo(tuple(self.prompt_token_ids), tuple(self.generation_token_ids))


class JsonSchema(Body):
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def guide(self) -> Guide | None:
        """Return the constraint; raises RequestError for a json_schema without its schema."""
        schema = None if self.json_schema is None else self.json_schema.schema_
        return make_format_guide(self.type, schema, f"{FORMAT_FIELD}.json_schema")


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatRequest(OpenAIRequest):
    """The body of POST .../chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    return_token_ids: bool | None = None  # vLLM's: adds the token ids of prompt and response

    def to_call(self, images: RequestImages = TEXT_ONLY) -> CallRequest:
        """Return the neutral call; raises RequestError for unsupported fields."""
        self._reject_unsupported()
        messages = tuple(message.message(f"messages.{i}", images) for i, message in enumerate(self.messages))
        tools = tuple(tool.model_dump(exclude_unset=True) for tool in self.tools or ())  # as the client wrote them
        guide = None if self.response_format is None else self.response_format.guide()
        call = self.make_call(messages, tools, by_format=guide, format_field=FORMAT_FIELD, ignored=IGNORED_FIELDS)
        num_known = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
        return replace(
            call,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            stop_strings=self.stop_strings,
            include_usage=self.stream_options is not None and bool(self.stream_options.include_usage),
            return_token_ids=bool(self.return_token_ids),
            return_logprobs=bool(self.logprobs),
            reads_message_logprobs=bool((self.model_extra or {}).get("return_tokens_as_token_ids")),
            session_id=_read_session(self.model_extra or {}),
            echo=self.messages[num_known - 1].echo() if num_known else None,
            num_known=num_known,
        )

    def _reject_unsupported(self) -> None:
        """Raise RequestError for values that need another policy or another way to sample."""
        if self.top_logprobs:
            raise make_unsupported_error("top_logprobs", "top_logprobs is not supported; logprobs is")
        if self.modalities not in (None, ["text"]):
            raise make_unsupported_error("modalities", "modalities must be ['text']")
        if any(not stop for stop in self.stop_strings) or len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(400, f"stop takes up to {MAX_STOP_STRINGS} non-empty strings", param="stop")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _read_session(fields: Mapping[str, Any]) -> str | None:
    """Return the session that `metadata` names, if any."""
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise RequestError(400, "metadata: must be an object", param="metadata")
    named = (metadata or {}).get(SESSION_FIELD)
    return named if isinstance(named, str) else None


class ChatCompletions(Dialect):
    """The dialect `/v1/chat/completions`."""

    paths = ("/chat/completions",)
    needs_session = False

    def parse(
        self,
        body: bytes,
        address: URL,
        find_response: FindResponse = find_none,
        images: RequestImages = TEXT_ONLY,
    ) -> CallRequest:
        return ChatRequest.from_json(body).to_call(images)

    def render(self, call: CallRequest, answer: CallAnswer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `chat.completion` object."""
        choice = {"index": 0, "message": _message_body(answer), "finish_reason": _finish_reason(answer)}
        choice["logprobs"] = _logprobs(answer, encoder)
        head = _head(answer.completion_id, answer.model, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(answer)}

    def open_stream(self, call: CallRequest) -> "ChunkStream":
        return ChunkStream(include_usage=call.include_usage)


class ChunkStream(EventStream):
    """`chat.completion.chunk` events; the finish reason comes after token ids and log-probs."""

    def __init__(self, *, include_usage: bool) -> None:
        super().__init__()
        self._head: dict[str, Any] = {}
        self._include_usage = include_usage

    def render_start(self, start: StreamStart) -> bytes:
        self._head = _head(start.completion_id, start.model, "chat.completion.chunk")
        if self._include_usage:
            self._head["usage"] = None
        return self._chunk({"role": "assistant", "content": ""})

    def render_text(self, kind: str, text: str) -> bytes:
        return self._chunk({"content" if kind == "text" else "reasoning_content": text})

    def render_call(self, delta: CallDelta) -> bytes:
        call = to_openai_tool_call(delta.call)
        opening = {**call, "index": delta.index, "function": {"name": delta.call.name, "arguments": ""}}
        arguments = {"index": delta.index, "function": {"arguments": delta.call.arguments}}
        return self._chunk({"tool_calls": [opening]}) + self._chunk({"tool_calls": [arguments]})

    def render_end(self, answer: CallAnswer, encoder: ChatEncoder) -> bytes:
        events = b""
        if answer.with_token_ids or answer.with_logprobs:
            token_ids = _token_fields(answer) if answer.with_token_ids else {}
            events += self._chunk(token_ids, logprobs=_logprobs(answer, encoder))
        events += self._chunk({}, finish_reason=_finish_reason(answer))
        if self._include_usage:
            events += render_event({**self._head, "choices": [], "usage": _usage(answer)})
        return events + b"data: [DONE]\n\n"

    def render_failure(self, error: RequestError) -> bytes:
        return render_event(error.body())

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return render_event({**self._head, "choices": [choice]})


def _finish_reason(answer: CallAnswer) -> str:
    if answer.is_truncated:
        return "length"
    return "tool_calls" if answer.response.message.tool_calls else "stop"


def _usage(answer: CallAnswer) -> dict[str, int]:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(completion_id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model}


def _message_body(answer: CallAnswer) -> dict[str, Any]:
    message = answer.response.message
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [to_openai_tool_call(call) for call in message.tool_calls]
        body["content"] = message.content or None
    if answer.response.reasoning is not None:
        body["reasoning_content"] = answer.response.reasoning
    return {**body, **_token_fields(answer)} if answer.with_token_ids else body


def _token_fields(answer: CallAnswer) -> dict[str, Any]:
    """Return the tokens of the call as its message carries them."""
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "generation_token_ids": answer.completion.token_ids,
        "generation_log_probs": answer.completion.logprobs,
    }


def _logprobs(answer: CallAnswer, encoder: ChatEncoder) -> dict[str, Any] | None:
    if not answer.with_logprobs:
        return None
    sampled = zip(answer.completion.token_ids, answer.completion.logprobs, strict=True)
    content = [{"token": encoder.decode((i,)), "logprob": p, "bytes": None, "top_logprobs": []} for i, p in sampled]
    return {"content": content, "refusal": None}
