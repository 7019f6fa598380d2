"""Error responses of the gateway; each API renders them in its own envelope."""

from typing import Any

from nemo_rl.gateway.sessions import CallFailureKind

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # other 4xx: invalid_request_error


class RequestError(Exception):
    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def named_message(self) -> str:
        """Return the message with the field's name in front, for envelopes that have no key for it."""
        text = str(self)
        return text if self.param is None or text.startswith(self.param) else f"{self.param}: {text}"

    def body(self) -> dict[str, Any]:
        """Return OpenAI's envelope, which the gateway's own endpoints use too."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class CallError(RequestError):
    """A call that failed through no fault of the client; `kind` is the reason."""

    kind: CallFailureKind


class EngineError(CallError):
    """500: the engine failed the request or missed its deadline."""

    kind = CallFailureKind.ENGINE

    def __init__(self, message: str, *, code: str = "engine_failed") -> None:
        super().__init__(500, message, code=code)


class ContextLengthError(CallError):
    """400: the conversation leaves no room for a response.

    Clients tell it by OpenAI's words: LiteLLM repeats a 400 without them as if it were a fault of the server, and NeMo
    Gym takes one without "context length" for an error.
    """

    kind = CallFailureKind.CONTEXT_LENGTH

    def __init__(
        self, num_tokens: int | None, max_model_len: int, *, asks_truncation: bool = False, cause: str = ""
    ) -> None:
        """Take the length of the conversation in tokens; None if it has too many characters to be encoded.

        `cause`: what the engine says, if it takes less than `max_model_len`.
        """
        self.num_tokens = max_model_len if num_tokens is None else num_tokens
        size = "more" if num_tokens is None else f"{num_tokens} tokens"
        message = f"This model's maximum context length is {max_model_len} tokens; {size} leave no room for a response"
        if cause:
            message = f"{message}; the engine takes fewer: {cause}"
        if asks_truncation:
            message += "; truncation: auto is accepted, but the gateway drops no part of a conversation"
        super().__init__(400, message, param="messages", code="context_length_exceeded")


def make_unsupported_error(param: str, message: str) -> RequestError:
    """Return the error for an unsupported field, or for one that would change the trained text."""
    return RequestError(400, message, param=param, code="unsupported")


def make_missing_error(param: str) -> RequestError:
    return RequestError(400, f"{param}: Field required", param=param)
