"""Content of messages on the wire: the parts of all APIs, read to the project's; some written back.

`Turns` collects the messages of a conversation from the turns, blocks or items of a request. What a policy that reads
text cannot take, an image above all, is refused with its place and its type.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.alias_generators import to_camel

from nemo_rl.data.messages import TEXT_TYPES
from nemo_rl.gateway.dialects.tools import full_name
from nemo_rl.gateway.schema import Body, CamelBody, RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import Message, Part, Role, TextPart, ThinkingPart, ToolCall, ToolResult

RAW_ARGUMENTS = "raw_arguments"  # arguments that are no JSON object, which Anthropic's and Gemini's APIs insist on
SIGNATURE_BYTES = 32
UNREAD_FIELDS = frozenset({"thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"})  # of Gemini's parts


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
    return merge_texts((_read_part(block, f"{where}.{i}", kinds) for i, block in enumerate(content)), separator)


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
    check_signature(block.signature, block.thinking or "", f"{where}.signature")
    return ThinkingPart(block.thinking or "")


def _read_tool_use(block: Block, where: str) -> ToolCall:
    missing = next((name for name in ("id", "name", "input") if getattr(block, name) is None), None)
    if missing:
        raise make_missing_error(f"{where}.{missing}")
    return ToolCall(block.id or "", block.name or "", _arguments_text(block.input))


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


class Item(Body):
    """An item of Responses: a message, the assistant's reasoning, a call of it, or the output of one."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: list[Block] | None = None  # of reasoning, where it has no content
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of a called function
    arguments: str | None = None
    output: Content | None = None

    def read(self, where: str) -> tuple[Role, tuple[Part, ...]]:
        """Return who says the item, and what; raises RequestError for a type or a content that is not supported."""
        if self.type == "reasoning":
            return "assistant", self._thinking()
        if self.type == "function_call":
            call_id, name, arguments = (self._required(key, where) for key in ("call_id", "name", "arguments"))
            return "assistant", (ToolCall(call_id, full_name(self.namespace, name), arguments),)
        if self.type == "function_call_output":
            if self.output is None:
                raise make_missing_error(f"{where}.output")
            call_id = self._required("call_id", where)
            return "tool", (ToolResult(call_id, read_text(self.output, f"{where}.output")),)
        if self.type != "message":
            text = f"{where}.type: items of type {self.type!r} are not supported"
            raise make_unsupported_error(f"{where}.type", text)
        if self.role == "assistant":
            return "assistant", read_parts(self.content, f"{where}.content", separator="")
        if self.content is None:
            raise make_missing_error(f"{where}.content")
        role: Role = "system" if self._required("role", where) in ("system", "developer") else "user"
        return role, read_text(self.content, f"{where}.content")

    def _thinking(self) -> tuple[ThinkingPart, ...]:
        """Return the thinking of a reasoning item; encrypted reasoning has none."""
        blocks = self.content if isinstance(self.content, list) and self.content else self.summary or ()
        text = "\n".join(block.text for block in blocks if block.text)
        return (ThinkingPart(text),) if text else ()

    def _required(self, name: str, where: str) -> str:
        value = getattr(self, name)
        if value is None:
            raise make_missing_error(f"{where}.{name}")
        return str(value)


def write_item(item_id: str, part: TextPart | ThinkingPart) -> dict[str, Any]:
    """Return the item of Responses that holds a part of a response."""
    if isinstance(part, ThinkingPart):
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    texts = [{"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": texts}


class FunctionCall(CamelBody):
    """A call of Gemini's API, where an id may be missing."""

    id: str | None = None
    name: Annotated[str, Field(min_length=1)]
    args: dict[str, Any] | None = None


class FunctionResponse(CamelBody):
    """A result of Gemini's API; `parts` would be images."""

    id: str | None = None
    name: Annotated[str, Field(min_length=1)]
    response: dict[str, Any]
    parts: Annotated[list[Any], Field(max_length=0)] | None = None

    def text(self) -> str:
        """Return the only value `output`, or `result` as Google's clients call it, else the whole object."""
        is_wrapped = self.response.keys() in ({"output"}, {"result"})
        value = next(iter(self.response.values())) if is_wrapped else self.response
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class GeminiPart(CamelBody):
    """A part of Gemini's API: its kind is the field that it has."""

    text: str | None = None
    thought: bool | None = None  # the text is one
    thought_signature: str | None = None  # of the thought that ends here; elsewhere it says nothing
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None

    def read(self, where: str, kinds: Sequence[str]) -> Part:
        """Return the part; raises RequestError for one that is not of one of these `kinds`."""
        given = {to_camel(name) for name in self.model_fields_set} - UNREAD_FIELDS
        given -= {"text"} if self.thought else {"thought"}
        if not given:
            raise make_missing_error(f"{where}.text")
        wrong = sorted(given - set(kinds)) or sorted(given)[1:]
        if wrong:
            text = f"{where}.{wrong[0]}: not supported here; one of {', '.join(kinds)} is"
            raise make_unsupported_error(f"{where}.{wrong[0]}", text)
        if (call := self.function_call) is not None:
            return ToolCall(call.id or "", call.name, _arguments_text(call.args))
        if (result := self.function_response) is not None:
            return ToolResult(result.id, (TextPart(result.text()),))
        return ThinkingPart(self.text or "") if self.thought else TextPart(self.text or "")


def write_gemini_part(part: Part) -> dict[str, Any]:
    """Return Gemini's part of a part of a response."""
    if isinstance(part, ThinkingPart):
        return {"text": part.text, "thought": True, "thoughtSignature": sign(part.text)}
    if isinstance(part, ToolCall):
        return {"functionCall": {"id": part.id, "name": part.name, "args": _arguments_object(part)}}
    assert isinstance(part, TextPart)  # a policy gives no results
    return {"text": part.text}


def write_block(part: Part) -> dict[str, Any]:
    """Return Anthropic's block of a part of a response; thinking is signed."""
    if isinstance(part, ThinkingPart):
        return {"type": "thinking", "thinking": part.text, "signature": sign(part.text)}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _arguments_object(part)}
    assert isinstance(part, TextPart)  # a policy gives no results
    return {"type": "text", "text": part.text}


def sign(thinking: str) -> str:
    """Return the signature of thinking, by which one that was changed is told from one that was returned.

    Clients of Gemini decode signatures from base64 in either of its alphabets: hexadecimal digits are both.
    """
    digest = blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=SIGNATURE_BYTES, person=b"nemo-rl")
    return digest.hexdigest()


def check_signature(signature: str | None, thinking: str, where: str) -> None:
    """Raise RequestError unless the signature at `where` is that of the thinking."""
    if signature != sign(thinking):
        raise RequestError(400, f"{where}: not that of this thinking", param=where)


def _arguments_text(arguments: Mapping[str, Any] | None) -> str:
    """Return the arguments of a call as a policy writes them."""
    if arguments is not None and arguments.keys() == {RAW_ARGUMENTS}:
        return str(arguments[RAW_ARGUMENTS])
    return json.dumps(arguments or {}, ensure_ascii=False)


def _arguments_object(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as the object that Anthropic's and Gemini's APIs take."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_ARGUMENTS: call.arguments}


def merge_texts(parts: Iterable[Part | None], separator: str = "") -> tuple[Part, ...]:
    """Return the parts that there are; adjacent texts become one, and so does adjacent thinking."""
    merged: list[Part] = []
    for kind, run in groupby((part for part in parts if part is not None), type):
        if kind is TextPart:
            merged.append(TextPart(separator.join(part.text for part in run if isinstance(part, TextPart))))
        elif kind is ThinkingPart:
            merged.append(ThinkingPart("".join(part.text for part in run if isinstance(part, ThinkingPart))))
        else:
            merged += run
    return tuple(merged)


class Turns:
    """The messages of a conversation so far.

    A call without an id gets one, and `answer` finds that of the call that a result answers.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._said: list[Part] | None = None  # by the assistant, whose message is not ended; None: others spoke last
        self._num_calls = 0
        self._unanswered: list[ToolCall] = []  # of the assistant's last message

    def add(self, role: Role, parts: Sequence[Part], *, begins: bool = False) -> None:
        """Add what `role` says.

        What the assistant says belongs to its last message unless others spoke since, or `begins`. In other turns the
        results of tools are messages of their own, before and after the text.
        """
        if role == "assistant":
            if begins or self._said is None:
                self._end_message()
                self._said, self._unanswered = [], []
            self._said += [self._name(part) if isinstance(part, ToolCall) else part for part in parts]
            return
        self._end_message()
        runs = [(key, tuple(run)) for key, run in groupby(parts, lambda part: isinstance(part, ToolResult))]
        for are_results, run in runs or [(False, ())]:
            self._messages += [Message("tool", (part,)) for part in run] if are_results else [Message(role, run)]

    def answer(self, result: ToolResult, name: str) -> ToolResult:
        """Return a result of a function with the id of its call: the first unanswered one of that name, or id."""
        for call in self._unanswered:
            if (result.call_id or call.id, name) == (call.id, call.name):
                self._unanswered.remove(call)
                return replace(result, call_id=call.id)
        return result

    def messages(self) -> tuple[Message, ...]:
        """Return the messages, and end the assistant's."""
        self._end_message()
        return tuple(self._messages)

    def messages_to_answer(self, where: str) -> tuple[Message, ...]:
        """Return the messages of the field `where`; raises RequestError where the assistant spoke last."""
        if self._said is not None:
            raise make_unsupported_error(where, f"{where}: the last is the assistant's; prefill is not supported")
        return self.messages()

    def _end_message(self) -> None:
        if self._said is not None:
            self._messages.append(Message("assistant", merge_texts(self._said)))
            self._said = None

    def _name(self, call: ToolCall) -> ToolCall:
        """Return a call with an id; a new one tells its place among the calls of the conversation."""
        self._num_calls += 1
        call = call if call.id else replace(call, id=f"call_{self._num_calls}")
        self._unanswered.append(call)
        return call
