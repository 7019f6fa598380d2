"""OpenAI's Responses API: `/v1/responses`. https://platform.openai.com/docs/api-reference/responses

A response's conversation is kept as long as its session, for `previous_response_id`. Built-in tools, stored prompts and
conversations, and what would change the sampled text are refused with 400.
"""

import time
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import Answer, CallRequest
from nemo_rl.gateway.dialects.common import DeltaEvents, OpenAIRequest, render_event
from nemo_rl.gateway.dialects.content import Item, Turns, write_item
from nemo_rl.gateway.dialects.formats import ResponseFormat
from nemo_rl.gateway.dialects.tools import MAX_TOOLS, FlatTool, read_flat_tools, write_call
from nemo_rl.gateway.schema import Body, RequestError, parse_body
from nemo_rl.gateway.streaming import CallDelta, StreamStart, TextDelta
from nemo_rl.types import Message, TextPart, ThinkingPart

IGNORED_FIELDS = frozenset({"metadata", "store", "user", "service_tier", "prompt_cache_key", "safety_identifier"})
IGNORED_FIELDS |= {"include", "prompt_cache_retention"}  # silently: they change nothing here
FORMAT_FIELD = "text.format"


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
        by_format = self.text.format.guide(FORMAT_FIELD) if self.text and self.text.format else None
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
        output = [write_item(f"rs_{unique}", ThinkingPart(response.reasoning))] if response.reasoning else []
        if response.message.content or not response.message.tool_calls:
            output.append(write_item(f"msg_{unique}", TextPart(response.message.content)))
        declared = call.echoed["tools"]
        output += [write_call(f"fc_{unique}_{i}", each, declared) for i, each in enumerate(response.message.tool_calls)]
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
        prefix, part = ("rs", ThinkingPart("")) if kind == "thinking" else ("msg", TextPart(""))
        item = write_item(self._new_id(prefix), part)
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
        item = write_call(self._new_id("fc"), delta.call, self._call.echoed["tools"])
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
        turns.add(*item.read(f"input.{i}"), begins=item.type == "reasoning")  # with which a response begins
    return turns.messages()


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
