"""Errors, the validation of JSON bodies, the gateway's own endpoints and its own fields in bodies of others.

Types are checked strictly; unknown fields are kept, to be named in a log line.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from nemo_rl.data.messages import to_openai_message
from nemo_rl.gateway.sessions import CallFailureKind, Chain, Echo, Session

TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # other 4xx: invalid_request_error


class RequestError(Exception):
    """An error response to one request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def named_message(self) -> str:
        """Return the message, which begins with the field: for envelopes without a place for it."""
        text = str(self)
        return text if self.param is None or text.startswith(self.param) else f"{self.param}: {text}"

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

    def __init__(self, num_tokens: int | None, max_model_len: int, *, asks_truncation: bool = False) -> None:
        """Take the tokens of the conversation; None: so many characters that they were not counted."""
        self.num_tokens = max_model_len if num_tokens is None else num_tokens
        size = "more than" if num_tokens is None else f"{num_tokens} tokens in"
        message = f"{size} a context length of {max_model_len} tokens: no room is left for a response"
        if asks_truncation:
            message += "; truncation: auto is accepted, but the gateway drops no part of a conversation"
        super().__init__(400, message, param="messages", code="context_length_exceeded")


def make_unsupported_error(param: str, message: str) -> RequestError:
    """Return the error of a request for something unsupported, or that would change what is trained."""
    return RequestError(400, message, param=param, code="unsupported")


def make_missing_error(param: str) -> RequestError:
    """Return the error of a request without a field."""
    return RequestError(400, f"{param}: Field required", param=param)


SESSION_FIELD = "nemo_rl_session"  # in `metadata`: the session of a client whose base URL is fixed
ModelT = TypeVar("ModelT", bound="Body")


class Body(BaseModel):
    """A JSON object, strictly typed: neither a number for a string nor a string for a number."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class CamelBody(Body):
    """A JSON object as protobuf has it: fields in camel case or in snake case, and a null is an absent field."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, value: Any) -> Any:
        return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


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


class EchoingMessage(Body):
    """A message on which a client may send back the tokens of the call that it came from."""

    role: str
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None

    def echo(self) -> Echo | None:
        """Return these tokens, if they are there; raises RequestError for what cannot be token ids."""
        if self.role != "assistant" or self.prompt_token_ids is None or self.generation_token_ids is None:
            return None
        for ids in (self.prompt_token_ids, self.generation_token_ids):
            if ids and not 0 <= min(ids) <= max(ids) < 2**31:
                raise RequestError(400, "token ids must be in 0..2**31", param="messages")
        return Echo(tuple(self.prompt_token_ids), tuple(self.generation_token_ids))


def named_session(fields: Mapping[str, Any]) -> str | None:
    """Return the session that a request's `metadata` names, if any."""
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise RequestError(400, "metadata: must be an object", param="metadata")
    named = (metadata or {}).get(SESSION_FIELD)
    return named if isinstance(named, str) else None


def parse_body(model: type[ModelT], body: bytes) -> ModelT:
    """Return the validated body; raises RequestError that names the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise RequestError(400, f"{param or 'body'}: {first['msg']}", param=param) from error


def session_body(session_id: str, session: Session) -> dict[str, Any]:
    """Return a session with its chains, token for token."""
    return {
        "id": session_id,
        "object": "session",
        "num_calls": session.num_calls,
        "rewards": session.rewards,
        "chains": [_chain_body(chain) for chain in session.chains()],
    }


def _chain_body(chain: Chain) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    # (version, start, end) in the chain's tokens, of messages during which weights were refitted
    spans: list[tuple[int, int, int]] = []
    for each in chain.message_log:
        spans += ((span.version, len(ids) + span.start, len(ids) + span.end) for span in each.weight_spans)
        ids += each.token_ids
        mask += [int(each.is_generated)] * len(each.token_ids)
        logprobs += each.generation_logprobs or [0.0] * len(each.token_ids)
    return {
        "token_ids": ids,
        "token_mask": mask,
        "generation_logprobs": logprobs,
        "messages": [to_openai_message(each.message) for each in chain.message_log],
        "weight_versions": chain.weight_versions,
        "weight_spans": spans,
        "rewards": chain.rewards,
    }
