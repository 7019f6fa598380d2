"""Shared parts of the requests and responses of several APIs: tool choices, guides, refused fields, events.

content.py reads the content of messages.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import to_json

from nemo_rl.gateway.calls import Forcing
from nemo_rl.gateway.schema import Body, RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import Guide, GuideKind

MAX_TOOLS = 1_000  # of a request


# Of any API; an API that has the field declares it. They would need another policy, another way to sample, or another
# reading of the conversation, so a request that has one is refused rather than answered as if it had not.
REFUSED_FIELDS = frozenset(
    {"audio", "background", "container", "conversation", "mcp_servers", "prediction", "prompt", "web_search_options"}
    | {"function_call", "functions", "logit_bias", "prompt_logprobs", "best_of", "echo"}
    # vLLM's
    | {"allowed_token_ids", "bad_words", "ignore_eos", "logits_processors", "min_tokens", "stop_token_ids"}
    | {"chat_template", "chat_template_kwargs", "continue_final_message", "documents", "truncate_prompt_tokens"}
    | {"structural_tag", "structured_outputs", "use_beam_search"}
    # what another of the APIs calls a field of this one
    | {"input", "instructions", "messages", "system", "text", "response_format", "output_config", "output_format"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "previous_response_id"}
)
# Values with which a field asks for nothing that is not so anyway.
NEUTRAL: Mapping[str, object] = {"best_of": 1, "min_tokens": 0, "n": 1, "add_generation_prompt": True}
GUIDED = "guided_"  # how the names of vLLM's older options for guided decoding begin


def extra_fields(body: Body) -> dict[str, Any]:
    """Return the fields beyond a body's schema that have a value other than a neutral one."""
    extra = (body.model_extra or {}).items()
    return {
        name: value
        for name, value in extra
        if value is not False and value not in (None, [], {}) and not (name in NEUTRAL and value == NEUTRAL[name])
    }


def reject_fields(body: Body, *, format_field: str) -> None:
    """Raise RequestError for the first field that cannot be honoured and must not be ignored.

    `format_field`: what this API calls the format of a response.
    """
    extra = extra_fields(body)
    for name in sorted(extra):
        if name.startswith(GUIDED):
            fields = format_field
            if "structured_outputs" in type(body).model_fields:
                fields += " or structured_outputs"
            raise make_unsupported_error(name, f"{name}: not supported; use {fields}")
        if name in REFUSED_FIELDS:
            raise make_unsupported_error(name, f"{name}: not supported by this server in this API")
    if "n" in extra:
        raise make_unsupported_error("n", "n must be 1; send the request n times")
    if (body.model_extra or {}).get("add_generation_prompt") is False:
        text = "add_generation_prompt: a response is always a turn of its own"
        raise make_unsupported_error("add_generation_prompt", text)


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
    """The constraints of a request on its tool calls."""

    parses_calls: bool = True  # False: calls stay text
    is_forced: bool = False  # a call, or a call of certain tools, is demanded
    is_required: bool = True  # of a forced choice: a text is no answer
    names: tuple[str, ...] = ()  # the tools that may be called

    def forcing(self, field: str) -> Forcing | None:
        """Return the demand that `field` of the request makes, if any."""
        return Forcing(field, self.names, is_required=self.is_required) if self.is_forced else None


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
        return ToolChoice(parses_calls=choice != "none", is_forced=choice == "required", names=tuple(tool_names))
    if choice.type == "function":
        names, mode = [(choice.function or {}).get("name", choice.name)], "required"
    else:
        tools = choice.tools if choice.allowed_tools is None else choice.allowed_tools.tools
        mode = choice.mode if choice.allowed_tools is None else choice.allowed_tools.mode
        if not tools or mode is None:
            raise make_missing_error("tool_choice.tools" if mode else "tool_choice.mode")
        names = [(tool.function or {}).get("name", tool.name) for tool in tools]
    check_chosen(names, tool_names, "tool_choice")
    is_required = mode == "required"
    is_forced = is_required or set(names) != set(tool_names)
    return ToolChoice(is_forced=is_forced, is_required=is_required, names=tuple(map(str, names)))


def check_chosen(names: Sequence[object], tool_names: Sequence[str], field: str) -> None:
    """Raise RequestError for a chosen tool that is not among the request's."""
    known = set(tool_names)
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    if unknown:
        raise RequestError(400, f"{field}: {unknown[0]!r} is not one of the request's tools", param=field)


def render_event(body: Mapping[str, Any], kind: str | None = None) -> bytes:
    """Return a server-sent event, with its kind where the API names it."""
    return (b"" if kind is None else b"event: %s\n" % kind.encode()) + b"data: " + to_json(body) + b"\n\n"
