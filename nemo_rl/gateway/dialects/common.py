"""Parts of requests and responses that several APIs have: content, tools, tool choices, guides, events."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field
from pydantic_core import to_json

from nemo_rl.gateway.schema import Body, RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import Guide, GuideKind

MAX_TOOLS = 1_000  # of a request

TEXT_TYPES = ("text", "input_text", "output_text")


class TextPart(Protocol):
    """A part of a message's content; of one that is no text, `text` is never read."""

    @property
    def type(self) -> str: ...
    @property
    def text(self) -> str | None: ...


def part_text(part: TextPart, where: str) -> str:
    """Return a part's text; raises RequestError for images, audio, documents and whatever else is no text."""
    if part.type not in TEXT_TYPES:
        text = f"{where}.type: content of type {part.type!r} is not supported: this policy reads text"
        raise make_unsupported_error(f"{where}.type", text)
    if part.text is None:
        raise make_missing_error(f"{where}.text")
    return part.text


def join_text(content: str | Sequence[TextPart] | None, where: str, separator: str = "\n") -> str:
    """Return a content's text, of which the request has the parts at `where`."""
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(part_text(part, f"{where}.{i}") for i, part in enumerate(content))


def extra_fields(body: Body) -> dict[str, Any]:
    """Return the fields beyond a body's schema that have a value."""
    extra = (body.model_extra or {}).items()
    return {name: value for name, value in extra if value is not False and value not in (None, [], {})}


def reject_fields(extra: Mapping[str, Any], rejected: Set[str]) -> None:
    """Raise RequestError for the first field that would need another policy or another way to sample."""
    for name in sorted(rejected & extra.keys()):
        raise make_unsupported_error(name, f"{name}: not supported by this server")


class JsonSchema(Body):
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The text that a response must be: chat completions nest the schema, the other APIs do not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def guide(self, field: str, *, nested: bool = False) -> Guide | None:
        """Return the constraint that `field` of the request asks for; raises RequestError without a schema."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Guide("json_object")
        schema = self.schema_
        if nested:
            schema = None if self.json_schema is None else self.json_schema.schema_
        if schema is None:
            raise make_missing_error(f"{field}.{'json_schema' if nested else 'schema'}")
        return Guide("json_schema", json.dumps(schema))


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of its kinds."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    def guide(self) -> Guide:
        """Return the constraint; raises RequestError unless there is exactly one."""
        schema = json.dumps(self.json_) if isinstance(self.json_, dict) else self.json_
        texts: dict[GuideKind, str | None] = {"json_schema": schema, "regex": self.regex, "grammar": self.grammar}
        guides = [Guide(kind, text) for kind, text in texts.items() if text is not None]
        guides += [Guide("json_object")] if self.json_object else []
        if len(guides) != 1 or self.model_extra:
            message = "structured_outputs takes exactly one of json, json_object, regex and grammar"
            raise RequestError(400, message, param="structured_outputs")
        return guides[0]


def choose_guide(by_format: Guide | None, structured: StructuredOutputs | None, field: str) -> Guide | None:
    """Return the only constraint of a request, if any; raises RequestError for two."""
    if structured is None:
        return by_format
    if by_format is not None:
        raise RequestError(400, f"{field} and structured_outputs exclude each other", param=field)
    return structured.guide()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request asks of its tool calls."""

    parses_calls: bool = True  # False: calls stay text
    is_forced: bool = False  # a call, or a call of certain tools, is demanded


class NamedTool(Body):
    """A tool by its name, which chat completions nest."""

    name: str | None = None
    function: dict[str, Any] | None = None


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class ChosenTool(Body):
    """An object as `tool_choice` of OpenAI's APIs; chat completions nest what it chooses."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    function: dict[str, Any] | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)] | None = None
    allowed_tools: AllowedTools | None = None


ToolChoiceBody = Literal["auto", "none", "required"] | ChosenTool


def read_tool_choice(choice: ToolChoiceBody | None, tool_names: Sequence[str]) -> ToolChoice:
    """Return what `tool_choice` of OpenAI's APIs asks; raises RequestError for a tool that the request has not.

    A choice among all tools is `auto`; one among some of them could be kept by masking tokens alone.
    """
    if choice is None or isinstance(choice, str):
        return ToolChoice(parses_calls=choice != "none", is_forced=choice == "required")
    if choice.type == "function":
        names, mode = [(choice.function or {}).get("name", choice.name)], "required"
    else:
        tools = choice.tools if choice.allowed_tools is None else choice.allowed_tools.tools
        mode = choice.mode if choice.allowed_tools is None else choice.allowed_tools.mode
        if not tools or mode is None:
            raise make_missing_error("tool_choice.tools" if mode else "tool_choice.mode")
        names = [(tool.function or {}).get("name", tool.name) for tool in tools]
    check_chosen(names, tool_names, "tool_choice")
    return ToolChoice(is_forced=mode == "required" or set(names) != set(tool_names))


def check_chosen(names: Sequence[object], tool_names: Sequence[str], field: str) -> None:
    """Raise RequestError for a chosen tool that is not among the request's."""
    known = set(tool_names)
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    if unknown:
        raise RequestError(400, f"{field}: {unknown[0]!r} is not one of the request's tools", param=field)


def render_event(body: Mapping[str, Any], kind: str | None = None) -> bytes:
    """Return a server-sent event, with its kind where the API names it."""
    return (b"" if kind is None else b"event: %s\n" % kind.encode()) + b"data: " + to_json(body) + b"\n\n"
