"""Google's Gemini API: `models/{model}:generateContent`, `:streamGenerateContent?alt=sse` and `:countTokens`.

The address names the model and the kind of answer. A call may have no id: a result then answers the first open call of
its name. Thoughts are returned on `includeThoughts`, with a signature at their end; a client of streams sends them back
in pieces. Fields that would change the sampled text are refused with 400. https://ai.google.dev/api/generate-content
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from yarl import URL

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import CallAnswer, CallDelta, CallRequest, Forcing, StreamStart
from nemo_rl.gateway.dialects.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Body,
    Turns,
    arguments_object,
    arguments_text,
    check_chosen,
    check_signature,
    make_tool,
    merge_texts,
    names_of,
    sign,
)
from nemo_rl.gateway.dialects.dialect import Dialect, EventStream, FindResponse, find_none, render_event
from nemo_rl.gateway.images import TEXT_ONLY, RequestImages
from nemo_rl.gateway.request_errors import RequestError, make_missing_error, make_unsupported_error
from nemo_rl.types import ContentPart, Guide, Message, Part, TextPart, ThinkingPart, ToolCall, ToolResult

STATUSES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED"}
STATUSES |= {409: "ABORTED", 429: "RESOURCE_EXHAUSTED"}  # other 4xx: INVALID_ARGUMENT
IGNORED_FIELDS = frozenset({"model", "safetySettings", "labels", "serviceTier", "store"})  # not logged
IGNORED_PART_FIELDS = frozenset({"thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"})
REFERENCES = frozenset({"$ref", "$defs", "ref", "defs"})  # keys of OpenAPI schemas
CONFIG = "generationConfig"
STREAM_ACTION = "streamGenerateContent"
MODEL_KINDS, USER_KINDS = ("thought", "functionCall", "text"), ("functionResponse", "text", "inlineData")


class CamelBody(Body):
    """A JSON object as protobuf has it: fields in camel case or in snake case, and a null is an absent field."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, value: Any) -> Any:
        return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


class GeminiCall(CamelBody):
    """A call, whose id may be missing."""

    id: str | None = None
    name: Annotated[str, Field(min_length=1)]
    args: dict[str, Any] | None = None


class Blob(CamelBody):
    mime_type: str
    data: str  # base64, in either alphabet


class ResponsePart(CamelBody):
    """A file beside a result."""

    inline_data: Blob | None = None


class FunctionResponse(CamelBody):
    """A result; `parts` are images."""

    id: str | None = None
    name: Annotated[str, Field(min_length=1)]
    response: dict[str, Any]
    parts: list[ResponsePart] | None = None

    def read(self, where: str, images: RequestImages) -> ToolResult:
        """Return the result; raises RequestError for a part that is no image, or for images that are not allowed."""
        content: list[ContentPart] = [TextPart(self.text())]
        for i, part in enumerate(self.parts or ()):
            place = f"{where}.parts.{i}.inlineData"
            if part.inline_data is None or not images.are_allowed:
                raise make_unsupported_error(place, f"{place}: results have text, and images if the policy sees")
            content.append(images.read_base64(part.inline_data.mime_type, part.inline_data.data, f"{place}.data"))
        return ToolResult(self.id, tuple(content))

    def text(self) -> str:
        """Return the only value `output`, or `result` as Google's clients call it, else the whole object."""
        is_wrapped = self.response.keys() in ({"output"}, {"result"})
        value = next(iter(self.response.values())) if is_wrapped else self.response
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class GeminiPart(CamelBody):
    """A part of a content: its kind is the field that it has."""

    text: str | None = None
    thought: bool | None = None  # the text is a thought
    thought_signature: str | None = None  # checked on the last part of a thought, ignored elsewhere
    function_call: GeminiCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Blob | None = None  # an image

    def read(self, where: str, kinds: Sequence[str], images: RequestImages) -> Part:
        """Return the part; raises RequestError unless it is one of these `kinds`."""
        given = {to_camel(name) for name in self.model_fields_set} - IGNORED_PART_FIELDS
        given -= {"text"} if self.thought else {"thought"}
        if not given:
            raise make_missing_error(f"{where}.text")
        kinds = [kind for kind in kinds if images.are_allowed or kind != "inlineData"]
        wrong = sorted(given - set(kinds)) or sorted(given)[1:]
        if wrong:
            text = f"{where}.{wrong[0]}: not supported here; one of {', '.join(kinds)} is"
            raise make_unsupported_error(f"{where}.{wrong[0]}", text)
        if (call := self.function_call) is not None:
            return ToolCall(call.id or "", call.name, arguments_text(call.args))
        if (result := self.function_response) is not None:
            return result.read(f"{where}.functionResponse", images)
        if (blob := self.inline_data) is not None:
            return images.read_base64(blob.mime_type, blob.data, f"{where}.inlineData.data")
        return ThinkingPart(self.text or "") if self.thought else TextPart(self.text or "")


class GeminiContent(CamelBody):
    role: Literal["user", "model", "function"] | None = None
    parts: list[GeminiPart] = Field(default_factory=list)

    def located_parts(self, where: str) -> list[tuple[str, GeminiPart]]:
        """Return (path in the request, part) pairs."""
        return [(f"{where}.parts.{i}", part) for i, part in enumerate(self.parts)]


class Declaration(CamelBody):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class DeclarationSet(CamelBody):
    """Some functions, or one tool that runs at Google."""

    function_declarations: Annotated[list[Declaration], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)

    def read(self, where: str) -> list[dict[str, Any]]:
        """Return the functions as templates render them; raises RequestError for a tool that runs at Google."""
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise make_unsupported_error(f"{where}.{name}", f"{where}.{name}: only functions are supported")
        tools: list[dict[str, Any]] = []
        for i, each in enumerate(self.function_declarations):
            schema = read_openapi_schema(each.parameters, f"{where}.functionDeclarations.{i}.parameters")
            tools.append(make_tool(each.name, each.description, each.parameters_json_schema or schema))
        return tools


def read_declarations(declared: Sequence[DeclarationSet]) -> tuple[dict[str, Any], ...]:
    """Return the functions of all sets of a request; raises RequestError for more than MAX_TOOLS."""
    tools = tuple(tool for i, each in enumerate(declared) for tool in each.read(f"tools.{i}"))
    if len(tools) > MAX_TOOLS:
        raise RequestError(400, f"tools: at most {MAX_TOOLS} functions, in all sets together", param="tools")
    return tools


def read_openapi_schema(schema: Any, where: str) -> dict[str, Any] | None:  # one branch per schema keyword  # noqa: C901
    """Convert a schema of OpenAPI 3.0, as Google's clients write it, to a JSON schema.

    Example: `{"type": "STRING", "nullable": True, "max_length": "3"}` is
    `{"type": ["string", "null"], "maxLength": 3}`.

    Raises RequestError for the field `where` if the schema is not an object, or has references, which only the fields
    for JSON schemas take.
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


class FunctionCallingConfig(CamelBody):
    """A choice of tools; `VALIDATED`: text, or a call that matches its schema (without tools: any text)."""

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "NONE", "ANY", "VALIDATED"] = "AUTO"
    allowed_function_names: list[str] | None = None


class ToolConfig(CamelBody):
    function_calling_config: FunctionCallingConfig = FunctionCallingConfig()

    def forcing(self, tools: Sequence[Mapping[str, Any]]) -> Forcing | None:
        """Return the demand, if any; raises RequestError for a function that may not be chosen."""
        chosen, where = self.function_calling_config, "toolConfig.functionCallingConfig"
        names = names_of(tools)
        if chosen.allowed_function_names:
            field = f"{where}.allowedFunctionNames"
            if chosen.mode not in ("ANY", "VALIDATED"):
                raise RequestError(400, f"{field}: only with mode ANY or VALIDATED", param=field)
            check_chosen(chosen.allowed_function_names, tools, field)
            names = tuple(chosen.allowed_function_names)
        is_required = chosen.mode == "ANY"
        is_forced = is_required or (chosen.mode == "VALIDATED" and bool(tools))
        return Forcing(f"{where}.mode", names, is_required=is_required) if is_forced else None


class ThinkingConfig(CamelBody):
    include_thoughts: bool | None = None


class GeminiGenerationConfig(CamelBody):
    response_mime_type: Literal["text/plain", "application/json"] = "text/plain"
    response_schema: dict[str, Any] | None = None  # OpenAPI
    response_json_schema: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    candidate_count: Literal[1] | None = None
    response_modalities: list[Literal["TEXT"]] | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, Field(le=0)] | None = None  # alternatives per token
    thinking_config: ThinkingConfig = ThinkingConfig()

    def guide(self) -> Guide | None:
        """Return the constraint on the response; raises RequestError for a schema of a response that is not JSON."""
        schema = self.response_json_schema or read_openapi_schema(self.response_schema, f"{CONFIG}.responseSchema")
        if self.response_mime_type == "application/json":
            return Guide("json_object") if schema is None else Guide("json_schema", json.dumps(schema))
        if schema is not None:
            field = f"{CONFIG}.responseMimeType"
            raise RequestError(400, f"{field}: a response with a schema is application/json", param=field)
        return None


class GenerateContentRequest(CamelBody):
    """The body of POST ...:generateContent."""

    contents: Annotated[list[GeminiContent], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    system_instruction: GeminiContent | None = None
    tools: Annotated[list[DeclarationSet], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_config: ToolConfig = ToolConfig()
    generation_config: GeminiGenerationConfig = GeminiGenerationConfig()

    def to_call(self, images: RequestImages) -> CallRequest:
        """Return the neutral call; raises RequestError for unsupported fields."""
        config = self.generation_config
        for body, prefix in ((self, ""), (config, f"{CONFIG}.")):
            body.reject_fields(format_field=f"{CONFIG}.responseJsonSchema", prefix=prefix)
        if not self.contents:
            raise make_missing_error("contents")
        tools = read_declarations(self.tools)
        forcing = self.tool_config.forcing(tools)
        return CallRequest(
            _to_messages(self.system_instruction, self.contents, images),
            tools,
            parses_tool_calls=self.tool_config.function_calling_config.mode != "NONE",
            forcing=forcing,
            guide=config.guide(),
            guide_field=f"{CONFIG}.responseMimeType",
            max_tokens=config.max_output_tokens,
            stop_strings=tuple(config.stop_sequences),
            return_logprobs=bool(config.response_logprobs),
            returns_thinking=bool(config.thinking_config.include_thoughts),
            ignored_fields=self._ignored_fields() - IGNORED_FIELDS,
            id_prefix="gen-",
        )

    def _ignored_fields(self) -> frozenset[str]:
        config, choice, calls = self.generation_config, self.tool_config, self.tool_config.function_calling_config
        located: list[tuple[str, Body]] = [("", self), (f"{CONFIG}.", config), ("toolConfig.", choice)]
        located += [(f"{CONFIG}.thinkingConfig.", config.thinking_config), ("toolConfig.functionCallingConfig.", calls)]
        located += [("tools.functionDeclarations.", one) for each in self.tools for one in each.function_declarations]
        return frozenset(f"{prefix}{name}" for prefix, body in located for name in body.extra_fields())


class CountTokensRequest(GenerateContentRequest):
    generate_content_request: GenerateContentRequest | None = None  # replaces all other fields


class CallIds:
    """Ids of calls and results, which clients may leave out."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._unanswered: list[ToolCall] = []  # calls of the model's last turn

    def begin_turn(self) -> None:
        self._unanswered = []

    def name(self, call: ToolCall) -> ToolCall:
        """Return a call with an id; a new id is its number in the conversation."""
        self._num_calls += 1
        call = call if call.id else replace(call, id=f"call_{self._num_calls}")
        self._unanswered.append(call)
        return call

    def match(self, result: ToolResult, name: str) -> ToolResult:
        """Return a result with the id of its call: the first unanswered one with that name and, if given, that id."""
        for call in self._unanswered:
            if (result.call_id or call.id, name) == (call.id, call.name):
                self._unanswered.remove(call)
                return replace(result, call_id=call.id)
        return result


def _to_messages(
    system: GeminiContent | None, contents: Sequence[GeminiContent], images: RequestImages
) -> tuple[Message, ...]:
    """Return contents as messages; consecutive ones of the model, the pieces of a stream, are one message."""
    turns, ids = Turns(), CallIds()
    thinking, last_role = "", None
    if system is not None:
        texts = [part.read(where, ("text",), TEXT_ONLY) for where, part in system.located_parts("systemInstruction")]
        turns.add("system", merge_texts(texts, "\n"))
    for i, each in enumerate(contents):
        role = "assistant" if each.role == "model" else "user"
        if role == "assistant" and last_role != role:
            ids.begin_turn()
        parts: list[Part] = []
        for where, part in each.located_parts(f"contents.{i}"):
            read = part.read(where, *((MODEL_KINDS, TEXT_ONLY) if role == "assistant" else (USER_KINDS, images)))
            thinking = thinking + read.text if isinstance(read, ThinkingPart) else ""
            if part.thought and part.thought_signature is not None:
                check_signature(part.thought_signature, thinking, f"{where}.thoughtSignature")
            if isinstance(read, ToolCall):
                read = ids.name(read)
            if isinstance(read, ToolResult) and part.function_response is not None:
                read = ids.match(read, part.function_response.name)
            parts.append(read)
        turns.add(role, merge_texts(parts, "" if role == "assistant" else "\n"))
        last_role = role
    return turns.messages_to_answer("contents")


class Gemini(Dialect):
    """The dialect `models/{model}:generateContent`."""

    paths = ("/models/{model:.+}:generateContent", f"/models/{{model:.+}}:{STREAM_ACTION}")
    count_paths = ("/models/{model:.+}:countTokens",)
    key_headers = ("X-Goog-API-Key",)
    key_parameters = ("key",)

    def parse(
        self,
        body: bytes,
        address: URL,
        find_response: FindResponse = find_none,
        images: RequestImages = TEXT_ONLY,
    ) -> CallRequest:
        call = GenerateContentRequest.from_json(body).to_call(images)
        model, _, action = address.path.partition("/models/")[2].rpartition(":")
        stream = action == STREAM_ACTION
        if stream and address.query.get("alt") != "sse":
            raise make_unsupported_error("alt", "alt: a stream consists of events; add ?alt=sse")
        return replace(call, model=model, stream=stream)

    def parse_count(self, body: bytes, images: RequestImages = TEXT_ONLY) -> CallRequest:
        parsed = CountTokensRequest.from_json(body)
        return (parsed.generate_content_request or parsed).to_call(images)

    def render_count(self, num_tokens: int) -> dict[str, Any]:
        return {"totalTokens": num_tokens}

    def render(self, call: CallRequest, answer: CallAnswer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `GenerateContentResponse`."""
        parts = answer.response.message.parts
        returned = [p for p in parts if not isinstance(p, ThinkingPart) or (p.text and call.returns_thinking)]
        return _finished([_write_part(part) for part in returned], answer, encoder)

    def open_stream(self, call: CallRequest) -> "ContentStream":
        return ContentStream(returns_thinking=call.returns_thinking)

    def render_error(self, error: RequestError) -> dict[str, Any]:
        """Return Google's envelope: the field is a `BadRequest`, the code an `ErrorInfo` among its details."""
        status = STATUSES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
        details: list[dict[str, Any]] = []
        if error.param is not None:
            violation = {"field": error.param, "description": str(error)}
            details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
        if error.code is not None:
            info = {"reason": error.code, "domain": "nemo-rl"}
            details.append({"@type": "type.googleapis.com/google.rpc.ErrorInfo", **info})
        return {"error": {"code": error.status, "message": error.named_message(), "status": status, "details": details}}


class ContentStream(EventStream):
    """Events that are responses themselves, each with the part that its delta adds."""

    def __init__(self, *, returns_thinking: bool) -> None:
        super().__init__(returns_thinking=returns_thinking)
        self._head: dict[str, Any] = {}

    def render_start(self, start: StreamStart) -> bytes:
        self._head = {"modelVersion": start.model, "responseId": start.completion_id}
        return b""

    def render_text(self, kind: str, text: str) -> bytes:
        return self._event({"text": text, **({"thought": True} if kind == "thinking" else {})})

    def render_call(self, delta: CallDelta) -> bytes:
        return self._event(_write_part(delta.call))

    def close_item(self, kind: str, text: str) -> bytes:
        if kind == "text":
            return b""
        return self._event({"text": "", "thought": True, "thoughtSignature": sign(text)})

    def render_end(self, answer: CallAnswer, encoder: ChatEncoder) -> bytes:
        return self.close() + render_event(_finished([], answer, encoder))

    def render_failure(self, error: RequestError) -> bytes:
        return render_event(Gemini().render_error(error))

    def _event(self, part: dict[str, Any]) -> bytes:
        candidate = {"content": {"role": "model", "parts": [part]}, "index": 0}
        return render_event({"candidates": [candidate], **self._head})


def _write_part(part: Part) -> dict[str, Any]:
    """Return the wire form of a part of a response."""
    if isinstance(part, ThinkingPart):
        return {"text": part.text, "thought": True, "thoughtSignature": sign(part.text)}
    if isinstance(part, ToolCall):
        return {"functionCall": {"id": part.id, "name": part.name, "args": arguments_object(part)}}
    assert isinstance(part, TextPart)  # a policy's response has no tool results
    return {"text": part.text}


def _finished(parts: list[dict[str, Any]], answer: CallAnswer, encoder: ChatEncoder) -> dict[str, Any]:
    """Return a response with its finish reason and at least one part: clients ignore a response without parts."""
    reason = "MAX_TOKENS" if answer.is_truncated else "STOP"
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts or [{"text": ""}]}, "index": 0}
    if answer.with_logprobs:
        sampled = zip(answer.completion.token_ids, answer.completion.logprobs, strict=True)
        chosen = [{"token": encoder.decode((i,)), "tokenId": i, "logProbability": p} for i, p in sampled]
        candidate["logprobsResult"] = {"chosenCandidates": chosen}
    prompt, sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}
    head = {"modelVersion": answer.model, "responseId": answer.completion_id}
    return {"candidates": [{**candidate, "finishReason": reason}], "usageMetadata": usage, **head}
