"""Calls between dialects and sessions: what an agent asks and what it is answered, whatever API it speaks.

A dialect (`dialects/`) parses an HTTP body into a `CallRequest` and renders an `Answer`; completions.py sees no others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.codec import ParsedResponse
from nemo_rl.gateway.schema import RequestError
from nemo_rl.gateway.sessions import Echo
from nemo_rl.gateway.streaming import Delta
from nemo_rl.types import Completion, Guide, Message


@dataclass(frozen=True, slots=True)
class Forcing:
    """A request's demand that the response be a call, or that its calls be of certain tools."""

    field: str  # of the request
    names: tuple[str, ...]  # the tools that may be called
    is_required: bool = True  # False: a text may be the answer


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A validated model call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool schemas, for the template
    parses_tool_calls: bool = True  # False: calls stay text, as with `tool_choice: none`
    allows_parallel_calls: bool = True  # False: the client gets a response's first call alone
    model: str | None = None  # the name that the client gave
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    guide: Guide | None = None  # what the response must match
    guide_field: str = "response_format"  # of the request, that asks for it
    forcing: Forcing | None = None  # a demand for a call of a tool
    stream: bool = False
    include_usage: bool = False  # in a stream
    return_token_ids: bool = False
    return_logprobs: bool = False
    reads_message_logprobs: bool = False  # the client finds log-probs beside the token ids, where these are returned
    returns_thinking: bool = True  # False: the client gets a response without its thinking
    session_id: str | None = None  # named in the body
    echo: Echo | None = None  # tokens of the call that the last assistant message came from
    num_known: int = 0  # messages up to and including that one
    ignored_fields: frozenset[str] = field(default=frozenset())  # worth a line in the log
    id_prefix: str = "chatcmpl-"  # of the completion's id
    previous_id: str | None = None  # the completion whose conversation `messages` follow
    is_kept: bool = False  # a later call may name this one instead of repeating its messages
    num_instructions: int = 0  # leading messages that are not kept
    asks_truncation: bool = False  # `truncation: auto`, which a refusal of a long conversation then mentions
    echoed: Mapping[str, Any] = field(default_factory=dict)  # the request's fields that the API repeats in its answer


@dataclass(frozen=True, slots=True)
class Answer:
    """A completed call."""

    completion_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    response: ParsedResponse
    with_token_ids: bool  # put them on the message, for clients that echo or keep them
    with_logprobs: bool

    @property
    def is_truncated(self) -> bool:
        return self.completion.finish_reason == "length"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.completion.token_ids)

    def token_fields(self) -> dict[str, Any]:
        """Return the tokens of the call as they stand on its message, for clients that echo or keep them."""
        return {
            "prompt_token_ids": self.prompt_token_ids,
            "generation_token_ids": self.completion.token_ids,
            "generation_log_probs": self.completion.logprobs,
        }


class EventStream(Protocol):
    """The server-sent events of one response."""

    def render_delta(self, delta: Delta) -> bytes:
        """Return the events of a delta; the first is a StreamStart."""
        ...

    def render_end(self, answer: Answer, encoder: ChatEncoder) -> bytes:
        """Return the last events."""
        ...

    def render_failure(self, error: RequestError) -> bytes:
        """Return the events of a response that failed after its first event."""
        ...


class Dialect(Protocol):
    """One API of model calls: a file of `dialects/`."""

    def parse(self, body: bytes) -> CallRequest:
        """Return the call that a body asks for; raises RequestError that names the first wrong field."""
        ...

    def render(self, call: CallRequest, answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
        """Return the body of a response."""
        ...

    def open_stream(self, call: CallRequest) -> EventStream:
        """Return the events of a response that is about to be sampled."""
        ...

    def render_error(self, error: RequestError) -> dict[str, Any]:
        """Return an error in the API's envelope."""
        ...


class CountingDialect(Dialect, Protocol):
    """An API that also counts the tokens of a call's prompt."""

    def parse_count(self, body: bytes) -> CallRequest:
        """Return the call whose tokens are to be counted; raises RequestError as `parse` does."""
        ...

    def render_count(self, num_tokens: int) -> dict[str, Any]:
        """Return the body of a count."""
        ...
