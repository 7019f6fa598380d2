"""Fields that OpenAI's two APIs share: tool choice, structured outputs, and the call that they make."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.gateway.calls import CallRequest, Forcing
from nemo_rl.gateway.dialects.bodies import MAX_TOOLS, Body, check_chosen, names_of
from nemo_rl.gateway.request_errors import RequestError, make_missing_error
from nemo_rl.types import Guide, GuideKind, Message


class NamedTool(Body):
    """A tool by its name, which chat completions nest."""

    name: str | None = None
    function: dict[str, Any] | None = None


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class ChosenTool(Body):
    """A `tool_choice` that is an object; chat completions nest the chosen function or tools."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    function: dict[str, Any] | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)] | None = None
    allowed_tools: AllowedTools | None = None


ToolChoiceBody = Literal["auto", "none", "required"] | ChosenTool


def read_forcing(choice: ToolChoiceBody | None, tools: Sequence[Mapping[str, Any]]) -> Forcing | None:
    """Return the demand of `tool_choice`, if any; raises RequestError for a tool that the request does not declare.

    `auto` among all tools demands nothing; `auto` among some of them does, and only masking tokens can meet it.
    """
    if choice is None or isinstance(choice, str):
        return Forcing("tool_choice", names_of(tools)) if choice == "required" else None
    if choice.type == "function":
        names, mode = [(choice.function or {}).get("name", choice.name)], "required"
    else:
        chosen = choice.tools if choice.allowed_tools is None else choice.allowed_tools.tools
        mode = choice.mode if choice.allowed_tools is None else choice.allowed_tools.mode
        if not chosen or mode is None:
            raise make_missing_error("tool_choice.tools" if mode else "tool_choice.mode")
        names = [(tool.function or {}).get("name", tool.name) for tool in chosen]
    check_chosen(names, tools, "tool_choice")
    if mode == "auto" and set(names) == set(names_of(tools)):
        return None
    return Forcing("tool_choice", tuple(map(str, names)), is_required=mode == "required")


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of its kinds."""

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


class OpenAIRequest(Body):
    """Fields that chat completions and Responses share."""

    model: str | None = None
    tool_choice: ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    stream: bool | None = None

    def make_call(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        *,
        by_format: Guide | None,
        format_field: str,
        ignored: frozenset[str],
    ) -> CallRequest:
        """Return the neutral call of these fields; raises RequestError for unsupported ones.

        `by_format`: the constraint that `format_field` asks for. `ignored`: fields that are not logged.
        """
        self.reject_fields(format_field=format_field)
        forcing = read_forcing(self.tool_choice, tools)
        if by_format is not None and self.structured_outputs is not None:
            text = f"{format_field} and structured_outputs exclude each other"
            raise RequestError(400, text, param=format_field)
        return CallRequest(
            messages,
            tools,
            parses_tool_calls=self.tool_choice != "none",
            allows_parallel_calls=self.parallel_tool_calls is not False,
            forcing=forcing,
            guide=by_format if self.structured_outputs is None else self.structured_outputs.guide(),
            guide_field=format_field if self.structured_outputs is None else "structured_outputs",
            model=self.model,
            stream=bool(self.stream),
            ignored_fields=frozenset(self.extra_fields().keys() - ignored),
        )
