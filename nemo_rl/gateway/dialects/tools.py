"""Tools in the requests of all APIs: declarations, namespaces, calls of a history, and what a response must call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.alias_generators import to_camel

from nemo_rl.gateway.calls import Forcing
from nemo_rl.gateway.schema import Body, CamelBody, RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import ToolCall

MAX_TOOLS = 1_000  # of a request
REFERENCES = frozenset({"$ref", "$defs", "ref", "defs"})  # of schemas of OpenAPI


class Function(Body):
    name: Annotated[str, Field(min_length=1)]


class NestedTool(Body):
    """A declaration of chat completions, which templates render as it is written."""

    type: Literal["function"]
    function: Function


class InputSchemaTool(Body):
    """A declaration of Anthropic's."""

    name: Annotated[str, Field(min_length=1)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def read(self, where: str) -> dict[str, Any]:
        """Return the tool as templates render it; raises RequestError for one that runs at Anthropic."""
        if self.type not in (None, "custom"):
            raise _unsupported_type(self.type, where)
        return make_tool(self.name, self.description, self.input_schema)


def make_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a function as templates render it; `parameters` is a JSON schema."""
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {"type": "object"}}}


class Declaration(CamelBody):
    """A function of Gemini's API."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class DeclarationSet(CamelBody):
    """Some functions of Gemini's API, or one tool that runs at Google."""

    function_declarations: Annotated[list[Declaration], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    def read(self, where: str) -> list[dict[str, Any]]:
        """Return the functions as templates render them; raises RequestError for a tool that runs at Google."""
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise make_unsupported_error(f"{where}.{name}", f"{where}.{name}: only functions are supported")
        tools: list[dict[str, Any]] = []
        for i, each in enumerate(self.function_declarations):
            read = read_openapi_schema(each.parameters, f"{where}.functionDeclarations.{i}.parameters")
            tools.append(make_tool(each.name, each.description, each.parameters_json_schema or read))
        return tools


def read_declarations(declared: Sequence[DeclarationSet]) -> tuple[dict[str, Any], ...]:
    """Return the functions of all sets of a request; raises RequestError for more than MAX_TOOLS."""
    tools = tuple(tool for i, each in enumerate(declared) for tool in each.read(f"tools.{i}"))
    if len(tools) > MAX_TOOLS:
        raise RequestError(400, f"tools: at most {MAX_TOOLS} functions, in all sets together", param="tools")
    return tools


def read_openapi_schema(schema: Any, where: str) -> dict[str, Any] | None:
    """Return a schema of OpenAPI 3.0, as Google's clients write it, as a JSON schema.

    Example: `{"type": "STRING", "nullable": True, "max_length": "3"}` is
    `{"type": ["string", "null"], "maxLength": 3}`.

    Raises RequestError with the field `where` for references, which JSON schemas alone have here, and for a schema that
    is no object.
    """
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise RequestError(400, f"{where}: a schema must be an object", param=where)
    if refused := sorted(REFERENCES & schema.keys()):
        text = f"{where}: {refused[0]!r} is not supported; use parametersJsonSchema or responseJsonSchema"
        raise make_unsupported_error(where, text)
    read: dict[str, Any] = {}
    for key, value in ((to_camel(key), value) for key, value in schema.items()):
        if key == "properties" and isinstance(value, dict):
            read[key] = {name: read_openapi_schema(each, where) for name, each in value.items()}
        elif isinstance(value, dict) and key in ("items", "additionalProperties"):
            read[key] = read_openapi_schema(value, where)
        elif key in ("anyOf", "prefixItems") and isinstance(value, list):
            read[key] = [read_openapi_schema(each, where) for each in value]
        elif key == "type":
            read[key] = str(value).lower()
        elif key.startswith(("min", "max")):
            read[key] = int(value) if isinstance(value, str) and value.isdecimal() else value  # int64 of protobuf
        elif key not in ("nullable", "propertyOrdering"):
            read[key] = value
    if not schema.get("nullable"):
        return read
    if "type" in read and not read.keys() & {"anyOf", "const", "enum"}:
        return {**read, "type": [read["type"], "null"]}
    return {"anyOf": [read, {"type": "null"}]}


class FlatTool(Body):
    """A declaration of Responses: a function, or a namespace of functions."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    tools: Annotated["list[FlatTool]", Field(max_length=MAX_TOOLS)] | None = None

    def read(self, where: str, namespace: str | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Return (place, tool as templates render it); a namespace's functions have its name before theirs."""
        if self.type not in ("function", "namespace") or (self.type == "namespace" and namespace is not None):
            raise _unsupported_type(self.type, where)
        if not self.name:
            raise make_missing_error(f"{where}.name")
        if self.type == "namespace":
            inner = enumerate(self.tools or ())
            return [each for i, one in inner for each in one.read(f"{where}.tools.{i}", self.name)]
        function = self.model_dump(exclude_unset=True, exclude={"type"})
        return [(where, {"type": "function", "function": {**function, "name": full_name(namespace, self.name)}})]


def read_flat_tools(declared: Sequence[FlatTool]) -> tuple[dict[str, Any], ...]:
    """Return the functions of a request, those of namespaces included.

    Raises RequestError for more than MAX_TOOLS, and for one that has the full name of a function of another namespace:
    a call would be of both.
    """
    by_place = [each for i, tool in enumerate(declared) for each in tool.read(f"tools.{i}")]
    if len(by_place) > MAX_TOOLS:
        raise RequestError(400, f"tools: at most {MAX_TOOLS}, those of namespaces included", param="tools")
    places: dict[str, str] = {}
    for where, tool in by_place:
        name = tool["function"]["name"]
        other = places.setdefault(name, where)
        if where.rpartition(".tools.")[0] != other.rpartition(".tools.")[0]:
            raise RequestError(400, f"{where}.name: {name!r} is the full name of {other} too", param=f"{where}.name")
    return tuple(tool for _, tool in by_place)


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the policy sees and calls a function."""
    return name if namespace is None else f"{namespace}.{name}"


def write_call(item_id: str, call: ToolCall, declared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a call as an item of Responses, its function named as the request's tools name it."""
    namespace, name = split_name(call.name, declared)
    within = {} if namespace is None else {"namespace": namespace}
    head = {"id": item_id, "type": "function_call", "call_id": call.id, "status": "completed"}
    return {**head, **within, "name": name, "arguments": call.arguments}


def split_name(called: str, declared: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Return the namespace and the name of a called function: either may have dots, so the declared tools decide.

    A function that no namespace has goes to the longest one whose name it begins with; a model may make up names.
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


def _unsupported_type(kind: str | None, where: str) -> RequestError:
    return make_unsupported_error(f"{where}.type", f"{where}.type: tools of type {kind!r} are not supported")


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class NestedCall(Body):
    """A call in a history of chat completions."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def read(self) -> ToolCall:
        arguments = self.function.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(self.id, self.function.name, text)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The constraints of a request on its tool calls."""

    field: str = "tool_choice"  # of the request, that makes the demand
    parses_calls: bool = True  # False: calls stay text
    is_forced: bool = False  # a call, or a call of certain tools, is demanded
    is_required: bool = True  # of a forced choice: a text is no answer
    names: tuple[str, ...] = ()  # the tools that may be called

    @property
    def forcing(self) -> Forcing | None:
        """Return the demand, if any."""
        return Forcing(self.field, self.names, is_required=self.is_required) if self.is_forced else None


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


def read_tool_choice(choice: ToolChoiceBody | None, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return what `tool_choice` of OpenAI's APIs asks; raises RequestError for a tool that the request has not.

    A choice among all tools is `auto`; one among some of them could be kept by masking tokens alone.
    """
    tool_names = names_of(tools)
    if choice is None or isinstance(choice, str):
        return ToolChoice(parses_calls=choice != "none", is_forced=choice == "required", names=tool_names)
    if choice.type == "function":
        names, mode = [(choice.function or {}).get("name", choice.name)], "required"
    else:
        chosen = choice.tools if choice.allowed_tools is None else choice.allowed_tools.tools
        mode = choice.mode if choice.allowed_tools is None else choice.allowed_tools.mode
        if not chosen or mode is None:
            raise make_missing_error("tool_choice.tools" if mode else "tool_choice.mode")
        names = [(tool.function or {}).get("name", tool.name) for tool in chosen]
    _check_chosen(names, tool_names, "tool_choice")
    is_required = mode == "required"
    is_forced = is_required or set(names) != set(tool_names)
    return ToolChoice(is_forced=is_forced, is_required=is_required, names=tuple(map(str, names)))


class TypedChoice(Body):
    """`tool_choice` of Anthropic's API."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def read(self, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
        """Return what is asked; raises RequestError for a tool that the request has not."""
        names = names_of(tools)
        if self.type == "tool":
            _check_chosen([self.name], names, "tool_choice.name")
            names = (self.name or "",)
        is_forced = self.type in ("any", "tool")
        return ToolChoice("tool_choice.type", parses_calls=self.type != "none", is_forced=is_forced, names=names)


class FunctionCallingConfig(CamelBody):
    """A choice of tools of Gemini's API; `VALIDATED` is a text, or a call by its schema: without tools, any text."""

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "NONE", "ANY", "VALIDATED"] = "AUTO"
    allowed_function_names: list[str] | None = None


class ToolConfig(CamelBody):
    function_calling_config: FunctionCallingConfig = FunctionCallingConfig()

    def read(self, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
        """Return what is asked; raises RequestError for a function that may not be chosen."""
        chosen, where = self.function_calling_config, "toolConfig.functionCallingConfig"
        names, is_required = names_of(tools), chosen.mode == "ANY"
        is_forced = is_required or (chosen.mode == "VALIDATED" and bool(tools))
        if chosen.allowed_function_names:
            field = f"{where}.allowedFunctionNames"
            if chosen.mode not in ("ANY", "VALIDATED"):
                raise RequestError(400, f"{field}: only with mode ANY or VALIDATED", param=field)
            _check_chosen(chosen.allowed_function_names, names, field)
            names = tuple(chosen.allowed_function_names)
        parses_calls = chosen.mode != "NONE"
        return ToolChoice(
            f"{where}.mode", parses_calls=parses_calls, is_forced=is_forced, is_required=is_required, names=names
        )


def names_of(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of tools as templates render them."""
    return tuple(tool["function"]["name"] for tool in tools)


def _check_chosen(names: Sequence[object], tool_names: Sequence[str], field: str) -> None:
    """Raise RequestError for a chosen tool that is not among the request's."""
    known = set(tool_names)
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    if unknown:
        raise RequestError(400, f"{field}: {unknown[0]!r} is not one of the request's tools", param=field)
