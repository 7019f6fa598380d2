"""Shared parts of the requests and responses of several APIs: refused fields, the events of a stream.

content.py reads the content of messages, tools.py tools and calls, formats.py the formats of responses.
"""

from collections.abc import Mapping
from typing import Any

from pydantic.alias_generators import to_snake
from pydantic_core import to_json

from nemo_rl.gateway.calls import CallRequest
from nemo_rl.gateway.dialects.formats import StructuredOutputs, choose_guide
from nemo_rl.gateway.dialects.tools import ToolChoiceBody, read_tool_choice
from nemo_rl.gateway.schema import Body, make_unsupported_error
from nemo_rl.gateway.streaming import CallDelta, Delta, ReasoningDelta, StreamStart
from nemo_rl.types import Guide, Message

# Of any API; an API that has the field declares it. They would need another policy, another way to sample, or another
# reading of the conversation, so a request that has one is refused rather than answered as if it had not.
REFUSED_FIELDS = frozenset(
    {"audio", "background", "container", "conversation", "mcp_servers", "prediction", "prompt", "web_search_options"}
    | {"function_call", "functions", "logit_bias", "prompt_logprobs", "best_of", "echo"}
    # vLLM's
    | {"allowed_token_ids", "bad_words", "ignore_eos", "logits_processors", "min_tokens", "stop_token_ids"}
    | {"chat_template", "chat_template_kwargs", "continue_final_message", "documents", "truncate_prompt_tokens"}
    | {"structural_tag", "structured_outputs", "use_beam_search"}
    # what another of the APIs calls a field of this one
    | {"input", "instructions", "messages", "system", "text", "response_format", "output_config", "output_format"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "previous_response_id"}
    | {"contents", "generation_config", "system_instruction", "tool_choice", "tool_config"}
    # Google's
    | {"cached_content", "continuation_token", "image_config", "model_selection_config", "routing_config"}
    | {"speech_config"}
)
# Values with which a field asks for nothing that is not so anyway.
NEUTRAL: Mapping[str, object] = {"best_of": 1, "min_tokens": 0, "n": 1, "add_generation_prompt": True}
GUIDED = "guided_"  # how the names of vLLM's older options for guided decoding begin


def extra_fields(body: Body) -> dict[str, Any]:
    """Return the fields beyond a body's schema that have a value other than a neutral one."""
    extra = (body.model_extra or {}).items()
    return {
        name: value
        for name, value in extra
        if value is not False and value not in (None, [], {}) and not (name in NEUTRAL and value == NEUTRAL[name])
    }


def reject_fields(body: Body, *, format_field: str, where: str = "") -> None:
    """Raise RequestError for the first field that cannot be honoured and must not be ignored.

    `format_field`: what this API calls the format of a response. `where`: the body's place in the request, with a dot.
    """
    extra = extra_fields(body)
    for key in sorted(extra):
        name = f"{where}{key}"
        if key.startswith(GUIDED):
            fields = format_field
            if "structured_outputs" in type(body).model_fields:
                fields += " or structured_outputs"
            raise make_unsupported_error(name, f"{name}: not supported; use {fields}")
        if to_snake(key) in REFUSED_FIELDS:
            raise make_unsupported_error(name, f"{name}: not supported by this server in this API")
    if "n" in extra:
        raise make_unsupported_error("n", "n must be 1; send the request n times")
    if (body.model_extra or {}).get("add_generation_prompt") is False:
        text = "add_generation_prompt: a response is always a turn of its own"
        raise make_unsupported_error("add_generation_prompt", text)


class OpenAIRequest(Body):
    """Fields that chat completions and Responses share."""

    model: str | None = None
    tool_choice: ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    stream: bool | None = None

    def make_call(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        *,
        by_format: Guide | None,
        format_field: str,
        ignored: frozenset[str],
    ) -> CallRequest:
        """Return the neutral call of these fields; raises RequestError for what is not supported.

        `by_format`: the constraint that `format_field` asks for. `ignored`: fields that need no line in the log.
        """
        reject_fields(self, format_field=format_field)
        choice = read_tool_choice(self.tool_choice, tools)
        return CallRequest(
            messages,
            tools,
            parses_tool_calls=choice.parses_calls,
            allows_parallel_calls=self.parallel_tool_calls is not False,
            forcing=choice.forcing,
            guide=choose_guide(by_format, self.structured_outputs, format_field),
            guide_field=format_field if self.structured_outputs is None else "structured_outputs",
            model=self.model,
            stream=bool(self.stream),
            ignored_fields=frozenset(extra_fields(self).keys() - ignored),
        )


def render_event(body: Mapping[str, Any], kind: str | None = None) -> bytes:
    """Return a server-sent event, with its kind where the API names it."""
    return (b"" if kind is None else b"event: %s\n" % kind.encode()) + b"data: " + to_json(body) + b"\n\n"


class DeltaEvents:
    """Events of deltas, by their kind; a base of the streams of all APIs.

    Text and thinking come in items (Anthropic: blocks), of which at most one is open: the first delta of a kind opens
    one, another kind closes it. APIs without items override neither `open_item` nor `close_item`.
    """

    def __init__(self, *, returns_thinking: bool = True) -> None:
        self._returns_thinking = returns_thinking
        self.open_kind: str | None = None  # of the open item
        self.open_text = ""  # that was sent in it

    def render_delta(self, delta: Delta) -> bytes:
        if isinstance(delta, StreamStart):
            return self.render_start(delta)
        if isinstance(delta, CallDelta):
            return self.close() + self.render_call(delta)
        if isinstance(delta, ReasoningDelta) and not self._returns_thinking:
            return b""
        kind = "thinking" if isinstance(delta, ReasoningDelta) else "text"
        events = b""
        if self.open_kind != kind:
            events = self.close() + self.open_item(kind)
            self.open_kind = kind
        self.open_text += delta.text
        return events + self.render_text(kind, delta.text)

    def close(self) -> bytes:
        """Return the events that end the open item, if any."""
        if self.open_kind is None:
            return b""
        (kind, text), self.open_kind, self.open_text = (self.open_kind, self.open_text), None, ""
        return self.close_item(kind, text)

    def render_start(self, start: StreamStart) -> bytes:
        raise NotImplementedError

    def render_text(self, kind: str, text: str) -> bytes:
        """Return the event of a piece of `text` or `thinking`."""
        raise NotImplementedError

    def render_call(self, delta: CallDelta) -> bytes:
        """Return the events of a whole call; no item is open."""
        raise NotImplementedError

    def open_item(self, kind: str) -> bytes:
        return b""

    def close_item(self, kind: str, text: str) -> bytes:
        return b""
