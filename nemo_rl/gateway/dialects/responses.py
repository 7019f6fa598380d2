"""OpenAI's Responses API: `/v1/responses`. https://platform.openai.com/docs/api-reference/responses

A response's conversation is kept as long as its session, for `previous_response_id`. Built-in tools, stored prompts and
conversations, and what would change the sampled text are refused with 400.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import Answer, CallRequest
from nemo_rl.gateway.dialects.common import DeltaEvents, OpenAIRequest, ResponseFormat, render_event
from nemo_rl.gateway.dialects.content import Block, Content, read_parts, read_text
from nemo_rl.gateway.dialects.tools import MAX_TOOLS, FlatTool, full_name, read_flat_tools, split_name
from nemo_rl.gateway.dialects.turns import Turns
from nemo_rl.gateway.schema import Body, RequestError, make_missing_error, make_unsupported_error, parse_body
from nemo_rl.gateway.streaming import CallDelta, StreamStart, TextDelta
from nemo_rl.types import Message, Part, Role, ThinkingPart, ToolCall, ToolResult

IGNORED_FIELDS = frozenset({"metadata", "store", "user", "service_tier", "prompt_cache_key", "safety_identifier"})
IGNORED_FIELDS |= {"include", "prompt_cache_retention"}  # silently: they change nothing here
FORMAT_FIELD = "text.format"


class Item(Body):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: list[Block] | None = None  # of reasoning, where it has no content
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of a called function
    arguments: str | None = None
    output: Content | None = None


class TextOptions(Body):
    format: ResponseFormat | None = None


class ResponsesRequest(OpenAIRequest):
    """The body of POST .../responses."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=10_000)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextOptions | None = None

    def to_call(self) -> CallRequest:
        """Return the neutral call; raises RequestError for what is not supported."""
        tools = read_flat_tools(self.tools or ())
        by_format = None
        if self.text is not None and self.text.format is not None:
            by_format = self.text.format.guide(FORMAT_FIELD)
        instructions = () if self.instructions is None else (Message("system", self.instructions),)
        messages = (*instructions, *_to_messages(self.input))
        call = self.make_call(messages, tools, by_format=by_format, format_field=FORMAT_FIELD, ignored=IGNORED_FIELDS)
        return replace(
            call,
            max_tokens=self.max_output_tokens,
            id_prefix="resp_",
            previous_id=self.previous_response_id,
            is_kept=True,
            num_instructions=len(instructions),
            asks_truncation=self.truncation == "auto",
            echoed=self._echoed(),
        )

    def _echoed(self) -> dict[str, Any]:
        return {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_output_tokens,
            "metadata": (self.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "truncation": "disabled",  # auto too: nothing is ever dropped
            "tool_choice": _as_written(self.tool_choice) or "auto",
            "text": _as_written(self.text) or {"format": {"type": "text"}},
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools or ()],
            "temperature": None,
            "top_p": None,
        }


class Responses:
    """The dialect `/v1/responses`."""

    def parse(self, body: bytes) -> CallRequest:
        return parse_body(ResponsesRequest, body).to_call()

    def render(self, call: CallRequest, answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `response` object."""
        response, unique = answer.response, answer.completion_id.removeprefix(call.id_prefix)
        output = [_reasoning_item(f"rs_{unique}", response.reasoning)] if response.reasoning else []
        if response.message.content or not response.message.tool_calls:
            output.append(_message_item(f"msg_{unique}", response.message.content))
        output += [_call_item(f"fc_{unique}_{i}", each, call) for i, each in enumerate(response.message.tool_calls)]
        return _finished(_head(call, answer.completion_id, answer.model), answer, output)

    def open_stream(self, call: CallRequest) -> "ItemStream":
        return ItemStream(call)

    def render_error(self, error: RequestError) -> dict[str, Any]:
        return error.body()


class ItemStream(DeltaEvents):
    """Events of output items, each added, filled with deltas and done, with consecutive numbers."""

    def __init__(self, call: CallRequest) -> None:
        super().__init__()
        self._call = call
        self._head: dict[str, Any] = {}
        self._number = 0
        self._output: list[dict[str, Any]] = []

    def render_start(self, start: StreamStart) -> bytes:
        self._head = _head(self._call, start.completion_id, start.model)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._head) for kind in kinds)

    def open_item(self, kind: str) -> bytes:
        make, prefix = (_reasoning_item, "rs") if kind == "thinking" else (_message_item, "msg")
        item = make(self._new_id(prefix), "")
        self._output.append(item)
        events = self._item_event("added", {**item, "status": "in_progress", "content": []})
        return events + self._part_event("response.content_part.added", part=item["content"][0])

    def render_text(self, kind: str, text: str) -> bytes:
        return self._text_event(kind, "delta", delta=text)

    def close_item(self, kind: str, text: str) -> bytes:
        item = self._output[-1]
        item["content"][0]["text"] = text
        events = self._text_event(kind, "done", text=text)
        events += self._part_event("response.content_part.done", part=item["content"][0])
        return events + self._item_event("done", item)

    def render_call(self, delta: CallDelta) -> bytes:
        arguments = delta.call.arguments
        item = _call_item(self._new_id("fc"), delta.call, self._call)
        self._output.append(item)
        where = {"output_index": len(self._output) - 1, "item_id": item["id"]}
        events = self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        events += self._event("response.function_call_arguments.delta", delta=arguments, **where)
        done = {"arguments": arguments, "name": item["name"]}
        events += self._event("response.function_call_arguments.done", **done, **where)
        return events + self._item_event("done", item)

    def render_end(self, answer: Answer, encoder: ChatEncoder) -> bytes:
        has_answer = any(item["type"] != "reasoning" for item in self._output)
        events = b"" if has_answer else self.render_delta(TextDelta(""))
        events += self.close()
        response = _finished(self._head, answer, self._output)
        return events + self._event(f"response.{response['status']}", response=response)

    def render_failure(self, error: RequestError) -> bytes:
        failure = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**self._head, "status": "failed", "error": failure})

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._head['id'].removeprefix(self._call.id_prefix)}_{len(self._output)}"

    def _item_event(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._output) - 1, item=item)

    def _text_event(self, kind: str, what: str, **fields: Any) -> bytes:
        if kind == "thinking":
            return self._part_event(f"response.reasoning_text.{what}", **fields)
        return self._part_event(f"response.output_text.{what}", **fields, logprobs=[])

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        index = len(self._output) - 1
        return self._event(kind, item_id=self._output[index]["id"], output_index=index, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return render_event(body, kind)


def _to_messages(items: str | list[Item]) -> tuple[Message, ...]:
    """Return items as messages: what the assistant wrote in one response is one message."""
    if isinstance(items, str):
        return (Message("user", items),)
    turns = Turns()
    for i, item in enumerate(items):
        where = f"input.{i}"
        if item.type == "reasoning":  # a response begins with it, and may have nothing else
            turns.say(_read_reasoning(item), begins=True)
        elif item.type == "message" and item.role == "assistant":
            turns.say(read_parts(item.content, f"{where}.content", separator=""))
        elif item.type == "function_call":
            call_id, name, arguments = (_required(item, key, where) for key in ("call_id", "name", "arguments"))
            turns.say([ToolCall(call_id, full_name(item.namespace, name), arguments)])
        else:
            turns.hear(*_read_others(item, where))
    return turns.messages()


def _read_reasoning(item: Item) -> tuple[ThinkingPart, ...]:
    """Return the thinking of a reasoning item; encrypted reasoning has none."""
    blocks = item.content if isinstance(item.content, list) and item.content else item.summary or ()
    text = "\n".join(block.text for block in blocks if block.text)
    return (ThinkingPart(text),) if text else ()


def _read_others(item: Item, where: str) -> tuple[Role, Sequence[Part]]:
    """Return who says an item that is not the assistant's, and what."""
    if item.type == "function_call_output":
        if item.output is None:
            raise make_missing_error(f"{where}.output")
        call_id = _required(item, "call_id", where)
        return "tool", (ToolResult(call_id, read_text(item.output, f"{where}.output")),)
    if item.type != "message":
        text = f"{where}.type: items of type {item.type!r} are not supported"
        raise make_unsupported_error(f"{where}.type", text)
    if item.content is None:
        raise make_missing_error(f"{where}.content")
    role: Role = "system" if _required(item, "role", where) in ("system", "developer") else "user"
    return role, read_text(item.content, f"{where}.content")


def _required(item: Item, name: str, where: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise make_missing_error(f"{where}.{name}")
    return str(value)


def _as_written(value: Body | str | None) -> Any:
    return value.model_dump(exclude_unset=True, by_alias=True) if isinstance(value, Body) else value


def _head(call: CallRequest, response_id: str, model: str) -> dict[str, Any]:
    head = {"id": response_id, "object": "response", "created_at": int(time.time()), "model": model}
    absent = {"error": None, "incomplete_details": None, "usage": None}
    return {**head, "status": "in_progress", **absent, **call.echoed, "output": []}


def _finished(head: dict[str, Any], answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    usage = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
    usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    status, details = ("incomplete", {"reason": "max_output_tokens"}) if answer.is_truncated else ("completed", None)
    return {**head, "status": status, "incomplete_details": details, "output": output, "usage": usage}


def _reasoning_item(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _message_item(item_id: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def _call_item(item_id: str, tool_call: ToolCall, call: CallRequest) -> dict[str, Any]:
    namespace, name = split_name(tool_call.name, call.echoed["tools"])
    within = {} if namespace is None else {"namespace": namespace}
    head = {"id": item_id, "type": "function_call", "call_id": tool_call.id, "status": "completed"}
    return {**head, **within, "name": name, "arguments": tool_call.arguments}
