"""OpenAI's Responses API: `/v1/responses`. https://platform.openai.com/docs/api-reference/responses

A response is kept as long as its session, for `previous_response_id` and for `item_reference`, by which clients (the AI
SDK by default) send items back. Built-in tools, stored prompts and conversations, and fields that would change the
sampled text are refused with 400.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from yarl import URL

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.errors import escape
from nemo_rl.gateway.calls import CallAnswer, CallDelta, CallRequest, StreamStart, TextDelta
from nemo_rl.gateway.dialects.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Content,
    ContentBlock,
    Turns,
    make_format_guide,
    make_tool_type_error,
    read_content,
)
from nemo_rl.gateway.dialects.dialect import Dialect, EventStream, FindResponse, find_none, render_event
from nemo_rl.gateway.dialects.openai import OpenAIRequest
from nemo_rl.gateway.images import TEXT_ONLY, RequestImages
from nemo_rl.gateway.request_errors import RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import Message, Part, Role, TextPart, ThinkingPart, ToolCall, ToolResult

IGNORED_FIELDS = frozenset({"metadata", "store", "user", "service_tier", "prompt_cache_key", "safety_identifier"})
IGNORED_FIELDS |= {"include", "prompt_cache_retention"}  # not logged: they change nothing here
FORMAT_FIELD = "text.format"
ID_PREFIX = "resp_"
ITEM_ID = re.compile(r"(?P<kind>rs|msg|fc)_(?P<response>[0-9a-f]+)(?:_(?P<index>[0-9]{1,4}))?")
ITEM_KINDS: Mapping[str, type[Part]] = {"rs": ThinkingPart, "msg": TextPart, "fc": ToolCall}


class Item(Body):
    """An item: a message, the assistant's reasoning, a call, the output of one, or a reference to an earlier item."""

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: list[ContentBlock] | None = None  # summary of reasoning; read if there is no content
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # namespace of the called function
    arguments: str | None = None
    output: Content | None = None

    def read(self, where: str, find_response: FindResponse, images: RequestImages) -> tuple[Role, tuple[Part, ...]]:
        """Return the role and the parts of the item; raises RequestError for an unsupported type or content."""
        if self.type == "item_reference":
            return "assistant", find_item(self._required("id", where), find_response, f"{where}.id")
        if self.type == "reasoning":
            return "assistant", self._thinking()
        if self.type == "function_call":
            call_id, name, arguments = (self._required(key, where) for key in ("call_id", "name", "arguments"))
            return "assistant", (ToolCall(call_id, full_name(self.namespace, name), arguments),)
        if self.type == "function_call_output":
            if self.output is None:
                raise make_missing_error(f"{where}.output")
            call_id = self._required("call_id", where)
            return "tool", (ToolResult(call_id, read_content(self.output, f"{where}.output", images)),)
        if self.type != "message":
            text = f"{where}.type: items of type {self.type!r} are not supported"
            raise make_unsupported_error(f"{where}.type", text)
        if self.role == "assistant":
            return "assistant", read_content(self.content, f"{where}.content", separator="")
        if self.content is None:
            raise make_missing_error(f"{where}.content")
        role: Role = "system" if self._required("role", where) in ("system", "developer") else "user"
        return role, read_content(self.content, f"{where}.content", images if role == "user" else TEXT_ONLY)

    @property
    def begins_response(self) -> bool:
        """Return whether it is thinking, the first item of a response."""
        return self.type == "reasoning" or (self.type == "item_reference" and (self.id or "").startswith("rs_"))

    def _thinking(self) -> tuple[ThinkingPart, ...]:
        """Return the thinking of a reasoning item, empty for encrypted reasoning."""
        blocks = self.content if isinstance(self.content, list) and self.content else self.summary or ()
        text = "\n".join(block.text for block in blocks if block.text)
        return (ThinkingPart(text),) if text else ()

    def _required(self, name: str, where: str) -> str:
        value = getattr(self, name)
        if value is None:
            raise make_missing_error(f"{where}.{name}")
        return str(value)


def find_item(item_id: str, find_response: FindResponse, where: str) -> tuple[Part, ...]:
    """Return the parts of an earlier response that an item stands for; raises RequestError for an unknown item.

    The ids are those of `make_item_id`. The first text of a response stands for all of it, further ones, into which a
    stream may have cut it, for nothing.
    """
    found = ITEM_ID.fullmatch(item_id)
    message = None if found is None else find_response(f"{ID_PREFIX}{found['response']}")
    if found is not None and message is not None:
        kind, index = found["kind"], int(found["index"] or 0)
        parts = tuple(part for part in message.parts if isinstance(part, ITEM_KINDS[kind]))
        if kind != "fc" or index < len(parts):
            return parts[index : index + 1]
    text = f"{where}: no item {escape(item_id, 80)!r} in this session"
    raise RequestError(404, text, param=where, code="item_not_found")


def make_item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of a response's item by its kind and its index among those; a first text's has no index."""
    suffix = f"_{index}" if kind == "fc" or index else ""
    return f"{kind}_{response_id.removeprefix(ID_PREFIX)}{suffix}"


class FlatTool(Body):
    """A declared function, or a namespace of functions."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: Annotated["list[FlatTool]", Field(max_length=MAX_TOOLS)] | None = None

    def read(self, where: str, namespace: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Return (path in the request, tool as templates render it) per function, with its namespace in the name."""
        if self.type not in ("function", "namespace") or (self.type == "namespace" and namespace is not None):
            raise make_tool_type_error(self.type, where)
        if not self.name:
            raise make_missing_error(f"{where}.name")
        if self.type == "namespace":
            inner = enumerate(self.tools or ())
            return [each for i, one in inner for each in one.read(f"{where}.tools.{i}", self.name)]
        function = self.model_dump(exclude_unset=True, exclude={"type"})
        return [(where, {"type": "function", "function": {**function, "name": full_name(namespace, self.name)}})]


def read_flat_tools(declared: Sequence[FlatTool]) -> tuple[dict[str, Any], ...]:
    """Return the functions of a request, those of namespaces included.

    Raises RequestError for more than MAX_TOOLS, and for equal full names in two namespaces: a call would be ambiguous.
    """
    located = [each for i, tool in enumerate(declared) for each in tool.read(f"tools.{i}")]
    if len(located) > MAX_TOOLS:
        raise RequestError(400, f"tools: at most {MAX_TOOLS}, those of namespaces included", param="tools")
    paths: dict[str, str] = {}
    for where, tool in located:
        name = tool["function"]["name"]
        other = paths.setdefault(name, where)
        if where.rpartition(".tools.")[0] != other.rpartition(".tools.")[0]:
            raise RequestError(400, f"{where}.name: {name!r} is the full name of {other} too", param=f"{where}.name")
    return tuple(tool for _, tool in located)


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the policy sees and calls a function."""
    return name if namespace is None else f"{namespace}.{name}"


class ResponsesFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Body):
    format: ResponsesFormat | None = None


class ResponsesRequest(OpenAIRequest):
    """The body of POST .../responses."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextOptions | None = None

    def to_call(self, find_response: FindResponse, images: RequestImages) -> CallRequest:
        """Return the neutral call; raises RequestError for unsupported fields."""
        tools = read_flat_tools(self.tools or ())
        form = None if self.text is None else self.text.format
        guide = None if form is None else make_format_guide(form.type, form.schema_, f"{FORMAT_FIELD}.schema")
        instructions = () if self.instructions is None else (Message("system", self.instructions),)
        messages = (*instructions, *_to_messages(self.input, find_response, images))
        call = self.make_call(messages, tools, by_format=guide, format_field=FORMAT_FIELD, ignored=IGNORED_FIELDS)
        return replace(
            call,
            max_tokens=self.max_output_tokens,
            id_prefix=ID_PREFIX,
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
            "truncation": "disabled",  # for "auto" too: nothing is ever dropped
            "tool_choice": _as_written(self.tool_choice) or "auto",
            "text": _as_written(self.text) or {"format": {"type": "text"}},
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools or ()],
            "temperature": None,
            "top_p": None,
        }


def _to_messages(items: str | list[Item], find_response: FindResponse, images: RequestImages) -> tuple[Message, ...]:
    """Return items as messages; the assistant's items of one response are one message."""
    if isinstance(items, str):
        return (Message("user", items),)
    turns = Turns()
    for i, item in enumerate(items):
        turns.add(*item.read(f"input.{i}", find_response, images), begins=item.begins_response)
    return turns.messages()


def _as_written(value: Body | str | None) -> Any:
    return value.model_dump(exclude_unset=True, by_alias=True) if isinstance(value, Body) else value


class Responses(Dialect):
    """The dialect `/v1/responses`."""

    paths = ("/responses",)

    def parse(
        self,
        body: bytes,
        address: URL,
        find_response: FindResponse = find_none,
        images: RequestImages = TEXT_ONLY,
    ) -> CallRequest:
        return ResponsesRequest.from_json(body).to_call(find_response, images)

    def render(self, call: CallRequest, answer: CallAnswer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `response` object."""
        response, made_id = answer.response, answer.completion_id
        thinking = ThinkingPart(response.reasoning or "")
        output = [_write_item(make_item_id("rs", made_id, 0), thinking)] if response.reasoning else []
        if response.message.content or not response.message.tool_calls:
            output.append(_write_item(make_item_id("msg", made_id, 0), TextPart(response.message.content)))
        for i, each in enumerate(response.message.tool_calls):
            output.append(_write_call(make_item_id("fc", made_id, i), each, call.echoed["tools"]))
        return _finished(_head(call, answer.completion_id, answer.model), answer, output)

    def open_stream(self, call: CallRequest) -> "ItemStream":
        return ItemStream(call)


class ItemStream(EventStream):
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
        item = _write_item(self._new_id(prefix), part)
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
        item = _write_call(self._new_id("fc"), delta.call, self._call.echoed["tools"])
        self._output.append(item)
        where = {"output_index": len(self._output) - 1, "item_id": item["id"]}
        events = self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        events += self._event("response.function_call_arguments.delta", delta=arguments, **where)
        done = {"arguments": arguments, "name": item["name"]}
        events += self._event("response.function_call_arguments.done", **done, **where)
        return events + self._item_event("done", item)

    def render_end(self, answer: CallAnswer, encoder: ChatEncoder) -> bytes:
        has_answer = any(item["type"] != "reasoning" for item in self._output)
        events = b"" if has_answer else self.render_delta(TextDelta(""))
        events += self.close()
        response = _finished(self._head, answer, self._output)
        return events + self._event(f"response.{response['status']}", response=response)

    def render_failure(self, error: RequestError) -> bytes:
        failure = {"code": "server_error", "message": str(error)}
        return self._event("response.failed", response={**self._head, "status": "failed", "error": failure})

    def _new_id(self, kind: str) -> str:
        index = sum(item["id"].startswith(f"{kind}_") for item in self._output)
        return make_item_id(kind, self._head["id"], index)

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


def _write_item(item_id: str, part: TextPart | ThinkingPart) -> dict[str, Any]:
    if isinstance(part, ThinkingPart):
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    texts = [{"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": texts}


def _write_call(item_id: str, call: ToolCall, declared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the item of a call, its function named as the request's tools name it."""
    namespace, name = _split_name(call.name, declared)
    within = {} if namespace is None else {"namespace": namespace}
    head = {"id": item_id, "type": "function_call", "call_id": call.id, "status": "completed"}
    return {**head, **within, "name": name, "arguments": call.arguments}


def _split_name(called: str, declared: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Return the namespace and the name of a called function: either may have dots, so the declared tools decide.

    An undeclared function (models make up names) goes to the longest namespace that its name begins with.
    """
    if any(tool["type"] == "function" and tool["name"] == called for tool in declared):
        return None, called
    spaces = [tool for tool in declared if tool["type"] == "namespace" and called.startswith(f"{tool['name']}.")]
    exact = [
        tool["name"]
        for tool in spaces
        if any(full_name(tool["name"], each["name"]) == called for each in tool.get("tools") or ())
    ]
    namespace = next(iter(exact), max((tool["name"] for tool in spaces), key=len, default=None))
    return namespace, called if namespace is None else called.removeprefix(f"{namespace}.")


def _head(call: CallRequest, response_id: str, model: str) -> dict[str, Any]:
    head = {"id": response_id, "object": "response", "created_at": int(time.time()), "model": model}
    absent = {"error": None, "incomplete_details": None, "usage": None}
    return {**head, "status": "in_progress", **absent, **call.echoed, "output": []}


def _finished(head: dict[str, Any], answer: CallAnswer, output: list[dict[str, Any]]) -> dict[str, Any]:
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    usage = {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}
    usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    status, details = ("incomplete", {"reason": "max_output_tokens"}) if answer.is_truncated else ("completed", None)
    return {**head, "status": status, "incomplete_details": details, "output": output, "usage": usage}
