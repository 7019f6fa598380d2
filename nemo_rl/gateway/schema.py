"""Request bodies: the supported part of OpenAI's chat completions, the gateway's own endpoints, and typed errors.

Types are checked strictly; unknown fields are kept, to be named in a log line. What a policy in training cannot honour
is refused with 400. The run decides how tokens are sampled, so a client's sampling parameters are ignored.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from nemo_rl.gateway.sessions import CallFailureKind, Echo
from nemo_rl.types import Message, Role, ToolCall

TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # other 4xx: invalid_request_error


class RequestError(Exception):
    """An error response to one request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class CallError(RequestError):
    """A chat request that could not be answered through no fault of the client; `kind` says what failed."""

    kind: CallFailureKind


class EngineError(CallError):
    """500: the engine failed the request, or did not answer before its deadline."""

    kind = CallFailureKind.ENGINE

    def __init__(self, message: str, *, code: str = "engine_failed") -> None:
        super().__init__(500, message, code=code)


class ContextLengthError(CallError):
    """400: the conversation leaves no room for a response.

    NeMo Gym takes "context length" in a 400 for the end of a truncated rollout, and anything else for an error.
    """

    kind = CallFailureKind.CONTEXT_LENGTH

    def __init__(self, size: str, max_model_len: int) -> None:
        message = f"{size} a context length of {max_model_len} tokens: no room is left for a response"
        super().__init__(400, message, param="messages", code="context_length_exceeded")


def make_unsupported_error(param: str, message: str) -> RequestError:
    """Return the error of a request for something unsupported, or that would change what is trained."""
    return RequestError(400, message, param=param, code="unsupported")


IGNORED_FIELDS = frozenset(  # silently: they change nothing here
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "return_tokens_as_token_ids"}
)
REJECTED_FIELDS = frozenset(
    {"audio", "chat_template", "chat_template_kwargs", "function_call", "functions", "guided_json", "logit_bias"}
    | {"prediction", "prompt_logprobs", "structured_outputs", "web_search_options"}
)
MAX_STOP_STRINGS = 16
SESSION_FIELD = "nemo_rl_session"  # in `metadata`: the session of a client whose base URL is fixed
ModelT = TypeVar("ModelT", bound="Body")


class Body(BaseModel):
    """A JSON object, strictly typed: neither a number for a string nor a string for a number."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class ContentPart(Body):
    type: str
    text: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class AssistantToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None

    def message(self) -> Message:
        """Return the message as templates see it; raises RequestError for images, audio and legacy function calls."""
        if (self.model_extra or {}).get("function_call"):
            raise make_unsupported_error("messages", "function_call is not supported; tool_calls are")
        role: Role = "system" if self.role == "developer" else self.role
        calls = tuple(
            ToolCall(call.id, call.function.name, _arguments_to_json(call.function.arguments))
            for call in self.tool_calls or ()
        )
        return Message(role, self._text(), calls, self.tool_call_id)

    def echo(self) -> Echo | None:
        """Return the tokens of the call that this message came from, where the client sent them back."""
        if self.role != "assistant" or self.prompt_token_ids is None or self.generation_token_ids is None:
            return None
        for ids in (self.prompt_token_ids, self.generation_token_ids):
            if ids and not 0 <= min(ids) <= max(ids) < 2**31:
                raise RequestError(400, "token ids must be in 0..2**31", param="messages")
        return Echo(tuple(self.prompt_token_ids), tuple(self.generation_token_ids))

    def _text(self) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise make_unsupported_error(
                    "messages", f"content of type {part.type!r} is not supported: this policy reads text"
                )
        return "\n".join(part.text or "" for part in self.content)


class Function(Body):
    name: Annotated[str, Field(min_length=1)]


class Tool(Body):
    type: Literal["function"]
    function: Function


class StreamOptions(Body):
    include_usage: bool | None = None


class ResponseFormat(Body):
    type: str


class ChatRequest(Body):
    """The body of POST .../chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    model: str | None = None
    tools: Annotated[list[Tool], Field(max_length=1_000)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    return_token_ids: bool | None = None  # vLLM's: the response's tokens and those of its prompt

    def reject_unsupported(self) -> None:
        """Raise RequestError for fields that would need another policy or another way to sample."""
        if self.n not in (None, 1):
            raise make_unsupported_error("n", "n must be 1; send the request n times")
        if self.tool_choice not in (None, "auto", "none"):
            raise make_unsupported_error(
                "tool_choice", "tool_choice must be 'auto' or 'none': the policy decides what it samples"
            )
        if self.top_logprobs:
            raise make_unsupported_error("top_logprobs", "top_logprobs is not supported; logprobs is")
        if self.response_format is not None and self.response_format.type != "text":
            raise make_unsupported_error(
                "response_format", "response_format must be 'text': the policy decides what it samples"
            )
        if self.modalities not in (None, ["text"]):
            raise make_unsupported_error("modalities", "modalities must be ['text']")
        if any(not stop for stop in self.stop_strings) or len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(400, f"stop takes up to {MAX_STOP_STRINGS} non-empty strings", param="stop")
        for name in sorted(REJECTED_FIELDS & self.extra.keys()):
            raise make_unsupported_error(name, f"{name} is not supported by this server")

    @property
    def extra(self) -> dict[str, Any]:
        """Return the fields beyond the schema that have a value."""
        return {name: value for name, value in (self.model_extra or {}).items() if value not in (None, [], {})}

    @property
    def ignored_fields(self) -> frozenset[str]:
        """Return ignored fields that are worth a log line: sampling parameters, unknown names."""
        names = self.extra.keys() - IGNORED_FIELDS - REJECTED_FIELDS
        return frozenset(names | ({"parallel_tool_calls"} if self.parallel_tool_calls is False else set()))

    @property
    def session_id(self) -> str | None:
        """Return the session that the request itself names."""
        metadata = (self.model_extra or {}).get("metadata")
        named = metadata.get(SESSION_FIELD) if isinstance(metadata, dict) else None
        return named if isinstance(named, str) else None

    @property
    def wants_logprobs(self) -> bool:
        """Return whether to add `logprobs`: clients that read token ids find log-probs on the message already."""
        return bool(self.logprobs) and not self.extra.get("return_tokens_as_token_ids")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def tool_schemas(self) -> tuple[dict[str, Any], ...]:
        """Return the tools as the client wrote them, for the template."""
        return tuple(tool.model_dump(exclude_unset=True) for tool in self.tools or ())


class RewardRequest(Body):
    """The body of POST /sessions/{id}/reward: a number, or several by name."""

    reward: FiniteFloat | None = None
    rewards: dict[str, FiniteFloat] | None = None
    completion_id: str | None = None  # the `id` of a completion: for the chains through that call alone

    def named(self) -> dict[str, float]:
        """Return the rewards by name; a single one is called "reward"."""
        if (self.reward is None) == (self.rewards is None):
            raise RequestError(400, "give either reward or rewards", param="reward")
        return {"reward": float(self.reward)} if self.reward is not None else dict(self.rewards or {})


class SessionRequest(Body):
    """The body of POST /sessions; may be empty."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = (
        None  # of the session's samples; None: derived from the run's seed
    )


def parse_body(model: type[ModelT], body: bytes) -> ModelT:
    """Return the validated body; raises RequestError that names the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise RequestError(400, f"{param or 'body'}: {first['msg']}", param=param) from error


def _arguments_to_json(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
