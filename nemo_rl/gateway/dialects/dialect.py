"""The interface of one API of model calls, and the table of all APIs.

A file beside this one holds one API whole: requests, responses, stream events, errors, paths and key headers. Deleting
the file removes the API.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, TypeAlias

from pydantic_core import to_json
from yarl import URL

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import CallAnswer, CallDelta, CallRequest, Delta, ReasoningDelta, StreamStart
from nemo_rl.gateway.images import TEXT_ONLY, RequestImages
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.types import Message

DIALECTS = {  # module of this package -> class
    "chat_completions": "ChatCompletions",
    "messages": "Messages",
    "responses": "Responses",
    "gemini": "Gemini",
}


FindResponse: TypeAlias = Callable[[str], Message | None]  # a response of the call's session by its id


def find_none(response_id: str) -> Message | None:
    """Find no response: the call has no session."""
    return None


class Dialect(ABC):
    """One API of model calls."""

    paths: tuple[str, ...]  # paths of calls below a base URL and its version, as aiohttp's router takes them
    count_paths: tuple[str, ...] = ()  # paths of requests that count the tokens of a prompt
    key_headers: tuple[str, ...] = ()  # headers for an API key, besides `Authorization: Bearer`
    key_parameters: tuple[str, ...] = ()  # query parameters for an API key
    needs_session: bool = True  # False: echoed token ids may identify the chain

    @abstractmethod
    def parse(
        self,
        body: bytes,
        address: URL,
        find_response: FindResponse = find_none,
        images: RequestImages = TEXT_ONLY,
    ) -> CallRequest:
        """Return the call that a request makes; raises RequestError that names the first wrong field."""

    def parse_count(self, body: bytes, images: RequestImages = TEXT_ONLY) -> CallRequest:
        """Return the call whose prompt is to be counted; raises RequestError as `parse` does."""
        raise NotImplementedError

    def render_count(self, num_tokens: int) -> dict[str, Any]:
        raise NotImplementedError

    @abstractmethod
    def render(self, call: CallRequest, answer: CallAnswer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return the body of a response."""

    @abstractmethod
    def open_stream(self, call: CallRequest) -> "EventStream":
        """Return the renderer of a response's events."""

    def render_error(self, error: RequestError) -> dict[str, Any]:
        """Return an error in the API's envelope, by default OpenAI's."""
        return error.body()


class EventStream(ABC):
    """Renders the server-sent events of one response.

    Text and thinking come in items (Anthropic: blocks), of which at most one is open: the first delta of a kind opens
    one, another kind closes it. APIs without items override neither `open_item` nor `close_item`.
    """

    def __init__(self, *, returns_thinking: bool = True) -> None:
        self._returns_thinking = returns_thinking
        self._open_kind: str | None = None  # "text" or "thinking"; None if no item is open
        self._open_text = ""  # sent in the open item

    def render_delta(self, delta: Delta) -> bytes:
        """Return the events of a delta; the first is a StreamStart."""
        if isinstance(delta, StreamStart):
            return self.render_start(delta)
        if isinstance(delta, CallDelta):
            return self.close() + self.render_call(delta)
        if isinstance(delta, ReasoningDelta) and not self._returns_thinking:
            return b""
        kind = "thinking" if isinstance(delta, ReasoningDelta) else "text"
        events = b""
        if self._open_kind != kind:
            events = self.close() + self.open_item(kind)
            self._open_kind = kind
        self._open_text += delta.text
        return events + self.render_text(kind, delta.text)

    def close(self) -> bytes:
        """Return the events that end the open item, if any."""
        if self._open_kind is None:
            return b""
        (kind, text), self._open_kind, self._open_text = (self._open_kind, self._open_text), None, ""
        return self.close_item(kind, text)

    @abstractmethod
    def render_start(self, start: StreamStart) -> bytes:
        """Return the first events."""

    @abstractmethod
    def render_text(self, kind: str, text: str) -> bytes:
        """Return the event of a piece of `text` or `thinking`."""

    @abstractmethod
    def render_call(self, delta: CallDelta) -> bytes:
        """Return the events of a whole call; no item is open."""

    def open_item(self, kind: str) -> bytes:
        return b""

    def close_item(self, kind: str, text: str) -> bytes:
        return b""

    @abstractmethod
    def render_end(self, answer: CallAnswer, encoder: ChatEncoder) -> bytes:
        """Return the last events."""

    @abstractmethod
    def render_failure(self, error: RequestError) -> bytes:
        """Return the events of a response that failed after its first event."""


def render_event(body: Mapping[str, Any], kind: str | None = None) -> bytes:
    """Return a server-sent event, with its kind if the API names it."""
    return (b"" if kind is None else b"event: %s\n" % kind.encode()) + b"data: " + to_json(body) + b"\n\n"


def load_dialects() -> tuple[Dialect, ...]:
    """Return one instance of each API in `DIALECTS` whose file exists."""
    modules = {f"{__package__}.{module}": name for module, name in DIALECTS.items()}
    return tuple(getattr(importlib.import_module(path), name)() for path, name in modules.items() if find_spec(path))
