"""Model calls in neutral form: an API parses a request into a `CallRequest` and renders deltas and a `CallAnswer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nemo_rl.gateway.codec import ParsedResponse
from nemo_rl.gateway.sessions import Echo
from nemo_rl.types import Completion, Guide, Message, ToolCall


@dataclass(frozen=True, slots=True)
class Forcing:
    """A request's demand that the response be a call, or that its calls be of certain tools."""

    field: str  # name of the request's field, for errors
    names: tuple[str, ...]  # tools that may be called
    is_required: bool = True  # False: the response may also be text


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A validated model call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool schemas, for the template
    parses_tool_calls: bool = True  # False: calls stay text, as with `tool_choice: none`
    allows_parallel_calls: bool = True  # False: the client gets only the first call of a response
    model: str | None = None  # name that the client gave
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    guide: Guide | None = None  # constraint on the response
    guide_field: str = "response_format"  # field that asks for the guide, for errors
    forcing: Forcing | None = None
    stream: bool = False
    include_usage: bool = False  # streams end with an event of the usage
    return_token_ids: bool = False
    return_logprobs: bool = False
    reads_message_logprobs: bool = False  # the client takes log-probs from beside the returned token ids
    returns_thinking: bool = True  # False: the response has no thinking
    session_id: str | None = None  # named in the body
    echo: Echo | None = None  # tokens of the call that sampled the last assistant message
    num_known: int = 0  # messages up to and including that one
    ignored_fields: frozenset[str] = field(default=frozenset())  # logged once per name
    id_prefix: str = "chatcmpl-"  # prefix of the completion's id
    previous_id: str | None = None  # completion whose conversation `messages` continue
    is_kept: bool = False  # a later call may name this one instead of repeating its messages
    num_instructions: int = 0  # leading messages that are not kept
    num_image_tokens: int = 0  # tokens of the images in `messages`, counted up to the model's context
    asks_truncation: bool = False  # `truncation: auto`; the error of a conversation that is too long mentions it
    echoed: Mapping[str, Any] = field(default_factory=dict)  # request fields that the API repeats in its answer


@dataclass(frozen=True, slots=True)
class CallAnswer:
    completion_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    response: ParsedResponse
    with_token_ids: bool  # the message carries them, for clients that echo or keep them
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


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The event before the first delta of a stream."""

    completion_id: str
    model: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A whole tool call, sent as soon as its markup is closed."""

    index: int
    call: ToolCall


Delta: TypeAlias = StreamStart | ReasoningDelta | TextDelta | CallDelta
Sink: TypeAlias = Callable[[Delta], None]
