"""Errors as OpenAI clients know them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # other 4xx: invalid_request_error


class RequestError(Exception):
    """An answer to one request that is not its result; concerns that request alone."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> RequestError:
    """A request for something that this server does not do, or that would change what is trained."""
    return RequestError(400, message, param=param, code="unsupported")
