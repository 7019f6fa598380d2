"""Google's Gemini API: `models/{model}:generateContent`, `:streamGenerateContent?alt=sse` and `:countTokens`.

The address names the model and the kind of answer. A call may have no id: then a result answers the first open call of
its name. Thoughts are returned on `includeThoughts`, with a signature at their end; a client of streams sends them back
in pieces. What would change the sampled text is refused with 400. https://ai.google.dev/api/generate-content
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import Answer, CallRequest
from nemo_rl.gateway.dialects.common import DeltaEvents, extra_fields, reject_fields, render_event
from nemo_rl.gateway.dialects.content import GeminiPart, Turns, check_signature, merge_texts, write_gemini_part
from nemo_rl.gateway.dialects.formats import TypedResponse
from nemo_rl.gateway.dialects.tools import MAX_TOOLS, DeclarationSet, ToolConfig, read_declarations
from nemo_rl.gateway.schema import Body, CamelBody, RequestError, make_missing_error, parse_body
from nemo_rl.gateway.streaming import CallDelta, StreamStart
from nemo_rl.types import Message, Part, ThinkingPart, ToolResult

STATUSES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED"}
STATUSES |= {409: "ABORTED", 429: "RESOURCE_EXHAUSTED"}  # other 4xx: INVALID_ARGUMENT
IGNORED_FIELDS = frozenset({"model", "safetySettings", "labels", "serviceTier", "store"})  # silently
CONFIG = "generationConfig"
MODEL_KINDS, USER_KINDS = ("thought", "functionCall", "text"), ("functionResponse", "text")


class Content(CamelBody):
    role: Literal["user", "model", "function"] | None = None
    parts: list[GeminiPart] = Field(default_factory=list)

    def pieces(self, where: str) -> list[tuple[str, GeminiPart]]:
        """Return the parts, each with its place."""
        return [(f"{where}.parts.{i}", part) for i, part in enumerate(self.parts)]


class ThinkingConfig(CamelBody):
    include_thoughts: bool | None = None


class GenerationConfig(TypedResponse):
    max_output_tokens: Annotated[int, Field(gt=0)] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    candidate_count: Literal[1] | None = None
    response_modalities: list[Literal["TEXT"]] | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, Field(le=0)] | None = None  # alternatives of each token
    thinking_config: ThinkingConfig = ThinkingConfig()


class GenerateContentRequest(CamelBody):
    """The body of POST ...:generateContent."""

    contents: Annotated[list[Content], Field(max_length=10_000)] = Field(default_factory=list)
    system_instruction: Content | None = None
    tools: Annotated[list[DeclarationSet], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_config: ToolConfig = ToolConfig()
    generation_config: GenerationConfig = GenerationConfig()

    def to_call(self) -> CallRequest:
        """Return the neutral call; raises RequestError for what is not supported."""
        config = self.generation_config
        for body, where in ((self, ""), (config, f"{CONFIG}.")):
            reject_fields(body, format_field=f"{CONFIG}.responseJsonSchema", where=where)
        if not self.contents:
            raise make_missing_error("contents")
        tools = read_declarations(self.tools)
        choice = self.tool_config.read(tools)
        return CallRequest(
            _to_messages(self.system_instruction, self.contents),
            tools,
            parses_tool_calls=choice.parses_calls,
            forcing=choice.forcing,
            guide=config.guide(CONFIG),
            guide_field=f"{CONFIG}.responseMimeType",
            max_tokens=config.max_output_tokens,
            stop_strings=tuple(config.stop_sequences),
            return_logprobs=bool(config.response_logprobs),
            returns_thinking=bool(config.thinking_config.include_thoughts),
            ignored_fields=self._unread_fields() - IGNORED_FIELDS,
            id_prefix="gen-",
        )

    def _unread_fields(self) -> frozenset[str]:
        config, choice, calls = self.generation_config, self.tool_config, self.tool_config.function_calling_config
        places: list[tuple[str, Body]] = [("", self), (f"{CONFIG}.", config), ("toolConfig.", choice)]
        places += [(f"{CONFIG}.thinkingConfig.", config.thinking_config), ("toolConfig.functionCallingConfig.", calls)]
        places += [("tools.functionDeclarations.", one) for each in self.tools for one in each.function_declarations]
        return frozenset(f"{where}{name}" for where, body in places for name in extra_fields(body))


class CountTokensRequest(GenerateContentRequest):
    generate_content_request: GenerateContentRequest | None = None  # in place of all other fields


def _to_messages(system: Content | None, contents: Sequence[Content]) -> tuple[Message, ...]:
    """Return contents as messages; those of the model that follow each other are one, cut in pieces by a stream."""
    turns, thinking = Turns(), ""
    if system is not None:
        texts = [part.read(where, ("text",)) for where, part in system.pieces("systemInstruction")]
        turns.add("system", merge_texts(texts, "\n"))
    for i, each in enumerate(contents):
        parts: list[Part] = []
        for where, part in each.pieces(f"contents.{i}"):
            read = part.read(where, MODEL_KINDS if each.role == "model" else USER_KINDS)
            thinking = thinking + read.text if isinstance(read, ThinkingPart) else ""
            if part.thought and part.thought_signature is not None:
                check_signature(part.thought_signature, thinking, f"{where}.thoughtSignature")
            if isinstance(read, ToolResult) and part.function_response is not None:
                read = turns.answer(read, part.function_response.name)
            parts.append(read)
        turns.add("assistant" if each.role == "model" else "user", merge_texts(parts, "\n" * (each.role != "model")))
    return turns.messages_to_answer("contents")


class Gemini:
    """The dialect `models/{model}:generateContent`, and with `streams` that of `:streamGenerateContent`."""

    def __init__(self, *, streams: bool = False) -> None:
        self._streams = streams

    def parse(self, body: bytes) -> CallRequest:
        return replace(parse_body(GenerateContentRequest, body).to_call(), stream=self._streams)

    def parse_count(self, body: bytes) -> CallRequest:
        """Return the call whose tokens are to be counted."""
        parsed = parse_body(CountTokensRequest, body)
        return (parsed.generate_content_request or parsed).to_call()

    def render_count(self, num_tokens: int) -> dict[str, Any]:
        return {"totalTokens": num_tokens}

    def render(self, call: CallRequest, answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return a `GenerateContentResponse`."""
        parts = answer.response.message.parts
        returned = [p for p in parts if not isinstance(p, ThinkingPart) or (p.text and call.returns_thinking)]
        return _finished([write_gemini_part(part) for part in returned], answer, encoder)

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


class ContentStream(DeltaEvents):
    """Events that are responses themselves, each with what its delta adds."""

    def __init__(self, *, returns_thinking: bool) -> None:
        super().__init__(returns_thinking=returns_thinking)
        self._head: dict[str, Any] = {}

    def render_start(self, start: StreamStart) -> bytes:
        self._head = {"modelVersion": start.model, "responseId": start.completion_id}
        return b""

    def render_text(self, kind: str, text: str) -> bytes:
        return self._event({"text": text, **({"thought": True} if kind == "thinking" else {})})

    def render_call(self, delta: CallDelta) -> bytes:
        return self._event(write_gemini_part(delta.call))

    def close_item(self, kind: str, text: str) -> bytes:
        return self._event({**write_gemini_part(ThinkingPart(text)), "text": ""}) if kind == "thinking" else b""

    def render_end(self, answer: Answer, encoder: ChatEncoder) -> bytes:
        return self.close() + render_event(_finished([], answer, encoder))

    def render_failure(self, error: RequestError) -> bytes:
        return render_event(Gemini().render_error(error))

    def _event(self, part: dict[str, Any]) -> bytes:
        candidate = {"content": {"role": "model", "parts": [part]}, "index": 0}
        return render_event({"candidates": [candidate], **self._head})


def _finished(parts: list[dict[str, Any]], answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
    """Return a response that has a reason to end; clients take one without parts for none, so there is one."""
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
