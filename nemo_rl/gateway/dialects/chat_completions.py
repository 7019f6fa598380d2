"""OpenAI's chat completions: the supported part of the request, the response, its events.

What a policy in training cannot honour is refused with 400. The run decides how tokens are sampled, so a client's
sampling parameters are ignored. https://platform.openai.com/docs/api-reference/chat
"""

import json
import time
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.messages import to_openai_tool_call
from nemo_rl.gateway.calls import Answer, CallRequest
from nemo_rl.gateway.dialects.common import (
    MAX_TOOLS,
    ResponseFormat,
    StructuredOutputs,
    ToolChoiceBody,
    choose_guide,
    extra_fields,
    read_tool_choice,
    reject_fields,
    render_event,
)
from nemo_rl.gateway.dialects.content import Content, read_text
from nemo_rl.gateway.schema import SESSION_FIELD, Body, RequestError, make_unsupported_error, parse_body
from nemo_rl.gateway.sessions import Echo
from nemo_rl.gateway.streaming import Delta, ReasoningDelta, StreamStart, TextDelta
from nemo_rl.types import Message, Role, ThinkingPart, ToolCall

IGNORED_FIELDS = frozenset(  # silently: they change nothing here
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "return_tokens_as_token_ids"}
)
MAX_STOP_STRINGS = 16


class ChatCompletions:
    """The dialect `/v1/chat/completions`."""

    def parse(self, body: bytes) -> CallRequest:
        return parse_body(ChatRequest, body).to_call()

    def render(self, call: CallRequest, answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `chat.completion` object."""
        choice = {
            "index": 0,
            "message": _message_body(answer),
            "logprobs": _logprobs(answer, encoder),
            "finish_reason": _finish_reason(answer),
        }
        head = _head(answer.completion_id, answer.model, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(answer)}

    def open_stream(self, call: CallRequest) -> "ChunkStream":
        return ChunkStream(include_usage=call.include_usage)

    def render_error(self, error: RequestError) -> dict[str, Any]:
        return error.body()


class ChunkStream:
    """`chat.completion.chunk` events; token ids and log-probs come with the last but one, then the finish reason."""

    def __init__(self, *, include_usage: bool) -> None:
        self._head: dict[str, Any] = {}
        self._include_usage = include_usage

    def render_delta(self, delta: Delta) -> bytes:
        if isinstance(delta, StreamStart):
            self._head = _head(delta.completion_id, delta.model, "chat.completion.chunk")
            if self._include_usage:
                self._head["usage"] = None
            return self._chunk({"role": "assistant", "content": ""})
        if isinstance(delta, ReasoningDelta):
            return self._chunk({"reasoning_content": delta.text})
        if isinstance(delta, TextDelta):
            return self._chunk({"content": delta.text})
        call = to_openai_tool_call(delta.call)
        opening = {**call, "index": delta.index, "function": {"name": delta.call.name, "arguments": ""}}
        arguments = {"index": delta.index, "function": {"arguments": delta.call.arguments}}
        return self._chunk({"tool_calls": [opening]}) + self._chunk({"tool_calls": [arguments]})

    def render_end(self, answer: Answer, encoder: ChatEncoder) -> bytes:
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


def _finish_reason(answer: Answer) -> str:
    if answer.is_truncated:
        return "length"
    return "tool_calls" if answer.response.message.tool_calls else "stop"


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = len(answer.prompt_token_ids), len(answer.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class AssistantToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None

    def message(self, where: str = "messages") -> Message:
        """Return the message as templates see it; raises RequestError for images, audio and legacy function calls."""
        if (self.model_extra or {}).get("function_call"):
            raise make_unsupported_error(f"{where}.function_call", "function_call is not supported; tool_calls are")
        role: Role = "system" if self.role == "developer" else self.role
        calls = tuple(
            ToolCall(call.id, call.function.name, _arguments_to_json(call.function.arguments))
            for call in self.tool_calls or ()
        )
        is_thinking = role == "assistant" and self.reasoning_content is not None
        thinking = (ThinkingPart(self.reasoning_content or ""),) if is_thinking else ()
        call_id = self.tool_call_id if role == "tool" else None  # with another role it means nothing
        return Message(role, (*thinking, *read_text(self.content, f"{where}.content")), calls, call_id)

    def echo(self) -> Echo | None:
        """Return the tokens of the call that this message came from, where the client sent them back."""
        if self.role != "assistant" or self.prompt_token_ids is None or self.generation_token_ids is None:
            return None
        for ids in (self.prompt_token_ids, self.generation_token_ids):
            if ids and not 0 <= min(ids) <= max(ids) < 2**31:
                raise RequestError(400, "token ids must be in 0..2**31", param="messages")
        return Echo(tuple(self.prompt_token_ids), tuple(self.generation_token_ids))


class Function(Body):
    name: Annotated[str, Field(min_length=1)]


class Tool(Body):
    type: Literal["function"]
    function: Function


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatRequest(Body):
    """The body of POST .../chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    model: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    modalities: list[str] | None = None
    return_token_ids: bool | None = None  # vLLM's: the response's tokens and those of its prompt

    def to_call(self) -> CallRequest:
        """Return the neutral call; raises RequestError for what is not supported."""
        self.reject_unsupported()
        messages = tuple(message.message(f"messages.{i}") for i, message in enumerate(self.messages))
        choice = read_tool_choice(self.tool_choice, [tool.function.name for tool in self.tools or ()])
        by_format = None if self.response_format is None else self.response_format.guide("response_format", nested=True)
        num_known = max((i + 1 for i, message in enumerate(messages) if message.role == "assistant"), default=0)
        return CallRequest(
            messages,
            self.tool_schemas(),
            parses_tool_calls=choice.parses_calls,
            allows_parallel_calls=self.parallel_tool_calls is not False,
            forcing=choice.forcing("tool_choice"),
            model=self.model,
            max_tokens=self.token_limit,
            stop_strings=self.stop_strings,
            guide=choose_guide(by_format, self.structured_outputs, "response_format"),
            guide_field="response_format" if self.structured_outputs is None else "structured_outputs",
            stream=bool(self.stream),
            include_usage=self.stream_options is not None and bool(self.stream_options.include_usage),
            return_token_ids=bool(self.return_token_ids),
            return_logprobs=bool(self.logprobs),
            reads_message_logprobs=bool((self.model_extra or {}).get("return_tokens_as_token_ids")),
            session_id=self.session_id,
            echo=self.messages[num_known - 1].echo() if num_known else None,
            num_known=num_known,
            ignored_fields=self.ignored_fields,
        )

    def reject_unsupported(self) -> None:
        """Raise RequestError for fields that would need another policy or another way to sample."""
        if self.top_logprobs:
            raise make_unsupported_error("top_logprobs", "top_logprobs is not supported; logprobs is")
        if self.modalities not in (None, ["text"]):
            raise make_unsupported_error("modalities", "modalities must be ['text']")
        if any(not stop for stop in self.stop_strings) or len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(400, f"stop takes up to {MAX_STOP_STRINGS} non-empty strings", param="stop")
        reject_fields(self, format_field="response_format")

    @property
    def ignored_fields(self) -> frozenset[str]:
        """Return ignored fields that are worth a log line: sampling parameters, unknown names."""
        return frozenset(extra_fields(self).keys() - IGNORED_FIELDS)

    @property
    def session_id(self) -> str | None:
        """Return the session that the request itself names."""
        metadata = (self.model_extra or {}).get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise RequestError(400, "metadata: must be an object", param="metadata")
        named = metadata.get(SESSION_FIELD) if isinstance(metadata, dict) else None
        return named if isinstance(named, str) else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """Return the tools as the client wrote them, for the template."""
        return tuple(tool.model_dump(exclude_unset=True) for tool in self.tools or ())


def _arguments_to_json(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _head(completion_id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": model}


def _message_body(answer: Answer) -> dict[str, Any]:
    message = answer.response.message
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [to_openai_tool_call(call) for call in message.tool_calls]
        body["content"] = message.content or None
    if answer.response.reasoning is not None:
        body["reasoning_content"] = answer.response.reasoning
    return {**body, **_token_fields(answer)} if answer.with_token_ids else body


def _token_fields(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "generation_token_ids": answer.completion.token_ids,
        "generation_log_probs": answer.completion.logprobs,
    }


def _logprobs(answer: Answer, encoder: ChatEncoder) -> dict[str, Any] | None:
    if not answer.with_logprobs:
        return None
    sampled = zip(answer.completion.token_ids, answer.completion.logprobs, strict=True)
    content = [{"token": encoder.decode((i,)), "logprob": p, "bytes": None, "top_logprobs": []} for i, p in sampled]
    return {"content": content, "refusal": None}
