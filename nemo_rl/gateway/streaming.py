"""Deltas of a response while its tokens are sampled.

A delta never splits a character, and never holds text that the parsers may still take: what may begin a stop string,
a thinking tag or a tool call is held back until it is decided. Text is held to the end of the response where a parser
is not in the tables below. The stream starts with the first token. After the first delta, tokens that come within
an interval of the last reading are read together when it is over, whether another comes or not: reading and sending
each token apart would cost the server several times what the whole call costs it. The interval grows with the number of
calls that run.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.codec import TAGGED_REASONING, THINK_CLOSE, THINK_OPEN, Codec, ParsedResponse, ReadingRules
from nemo_rl.gateway.schema import EngineError
from nemo_rl.types import Completion, ToolCall

logger = logging.getLogger(__name__)

INTERVAL_S, MAX_INTERVAL_S = 0.05, 0.25  # between the deltas of a stream: the longest that a token waits
DELTAS_PER_S = 320  # of all streams of a server, as far as their intervals allow; each costs it some 50 us
UNDECIDED = "\ufffd"  # what a decoder writes for bytes that are no character yet


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Comes before the first delta."""

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
CallLater: TypeAlias = Callable[[float, Callable[[], None]], asyncio.TimerHandle]  # (seconds, what to call)


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """The marks that begin and end a tool call in a parser's text; `only_at_start`: a call is the whole response."""

    opening: tuple[str, ...]
    closing: str | None
    only_at_start: bool = False


CALL_MARKUP: Mapping[str, CallMarkup] = {
    "hermes": CallMarkup(("<tool_call>",), "</tool_call>"),
    "qwen3_coder": CallMarkup(("<tool_call>", "<function="), "</function>"),
    "llama3_json": CallMarkup(("{",), None, only_at_start=True),
}


def choose_interval_s(num_calls: int) -> float:
    """Return the seconds between deltas of each stream while so many calls run.

    Example: 16 calls have 0.05 s, 64 have 0.2 s.
    """
    return min(max(INTERVAL_S, num_calls / DELTAS_PER_S), MAX_INTERVAL_S)


class TokenDecoder:
    """Text of tokens as they come; a character whose bytes are not complete waits for the rest."""

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder
        self._token_ids: list[int] = []
        self._window = 0  # decoding starts here: a token's text may depend on the one before it
        self._decoded = 0  # tokens whose text was returned

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        self._token_ids += token_ids
        known = self._encoder.decode(self._token_ids[self._window : self._decoded])
        text = self._encoder.decode(self._token_ids[self._window :])
        if len(text) <= len(known) or text.endswith(UNDECIDED):
            return ""
        self._window, self._decoded = self._decoded, len(self._token_ids)
        return text[len(known) :]


class ResponseStream:
    """Sends the deltas of one response to a sink: `feed` while tokens come, then `finish`.

    A context manager: after the block no timer is left.
    """

    def __init__(
        self,
        codec: Codec,
        start: StreamStart,
        sink: Sink,
        rules: ReadingRules,
        *,
        interval_s: Callable[[], float] = lambda: INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater | None = None,
    ) -> None:
        """Make a stream; `interval_s` is asked at each reading for the seconds to the next one.

        `call_later` is the event loop's, without which a token waits for the next one.
        """
        self._codec, self._start, self._sink, self._rules = codec, start, sink, rules
        self._interval_s, self._clock, self._call_later = interval_s, clock, call_later
        self._timer: asyncio.TimerHandle | None = None
        self._next_read_at = 0.0  # when tokens are read again
        self._decoder = TokenDecoder(codec.encoder)
        self._fed: list[int] = []
        self._num_read = 0  # of these
        self._error: Exception | None = None  # of a reading; the timer's caller would lose it
        self._text = ""
        self._sent = {ReasoningDelta: "", TextDelta: ""}
        self._num_calls = 0
        self._num_closed = 0  # closing tags that were seen
        self._has_started = False
        self._has_sent = False  # a delta after the start
        tool_parser = codec.tool_parser_name if rules.with_tools else None
        reasoning_parser = codec.reasoning_parser_name
        self._markup = CALL_MARKUP.get(tool_parser or "")
        is_readable = reasoning_parser in (None, *TAGGED_REASONING) and (
            tool_parser is None or self._markup is not None
        )
        self._holds_all = not is_readable
        self._thinking_start = 0 if rules.is_thinking and reasoning_parser is not None else None
        self._content_start = 0 if reasoning_parser is None else None  # None: not known yet

    def feed(self, start: int, token_ids: Sequence[int]) -> None:
        """Take tokens, of which the first has index `start`; those that came before are skipped (an engine's retry).

        Raises the error of a reading, also of an earlier one that the timer started.
        """
        self._raise_error()
        self._fed += token_ids[len(self._fed) - start :]
        if self._fed:
            self._begin()
        if self._holds_all or len(self._fed) == self._num_read:
            return
        wait_s = self._next_read_at - self._clock() if self._has_sent else 0.0
        if wait_s <= 0:
            self._read_fed()
            self._raise_error()
        elif self._timer is None and self._call_later is not None:
            self._timer = self._call_later(wait_s, self._read_fed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_fed(self) -> None:
        """Read the tokens that were fed since the last reading; an error is kept for `_raise_error`."""
        self._stop_timer()
        self._next_read_at = self._clock() + self._interval_s()
        try:
            self._read(self._fed[self._num_read :])
        except Exception as error:  # of the tokenizer, a parser or the sink
            self._error = error
        else:
            self._num_read = len(self._fed)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _read(self, token_ids: Sequence[int]) -> None:
        """Send what these tokens decide."""
        self._text += self._decoder.feed(token_ids)
        text, is_ended = self._before_stop()
        if self._content_start is None:
            self._read_thinking(text, is_ended=is_ended)
        if self._content_start is not None:
            self._read_content(text, self._content_start)

    def finish(self, completion: Completion, response: ParsedResponse) -> None:
        """Send what is left.

        Raises EngineError where other tokens were streamed than the completion has, and the error of a reading.
        """
        self._stop_timer()
        self._raise_error()
        if tuple(self._fed) != completion.token_ids[: len(self._fed)]:
            raise EngineError("the engine replaced tokens that were streamed already")
        self._begin()
        self._send_rest(ReasoningDelta, response.reasoning or "")
        self._send_rest(TextDelta, response.message.content)
        self._send_calls(response.message.tool_calls)

    def _before_stop(self) -> tuple[str, bool]:
        """Return the text before a stop string, or before what may begin one, and whether one was found."""
        found = [at for stop in self._rules.stop_strings if (at := self._text.find(stop)) >= 0]
        if found:
            return self._text[: min(found)], True
        return self._text[: safe_length(self._text, self._rules.stop_strings)], False

    def _read_thinking(self, text: str, *, is_ended: bool) -> None:
        if self._thinking_start is None:
            opening = text.lstrip()
            if THINK_OPEN.startswith(opening):
                return  # it may still become the tag
            if not opening.startswith(THINK_OPEN):
                self._content_start = 0
                return
            self._thinking_start = text.index(THINK_OPEN) + len(THINK_OPEN)
        end = text.find(THINK_CLOSE, self._thinking_start)
        is_closed = end >= 0
        if not is_closed:
            end = len(text) if is_ended else safe_length(text, (THINK_CLOSE,))
        self._send(ReasoningDelta, text[self._thinking_start : end].strip())
        if is_closed:
            self._content_start = end + len(THINK_CLOSE)

    def _read_content(self, text: str, start: int) -> None:
        content = text[start:].lstrip() if start else text
        if self._markup is None:
            self._send(TextDelta, content.rstrip())
            return
        if self._markup.only_at_start:
            if content.strip() and not content.lstrip().startswith(self._markup.opening):
                self._send(TextDelta, content.rstrip())
            return
        opened = [at for tag in self._markup.opening if (at := content.find(tag)) >= 0]
        end = min(opened) if opened else safe_length(content, self._markup.opening)
        self._send(TextDelta, content[:end].rstrip())
        closing = self._markup.closing or ""
        num_closed = content.count(closing) if opened else 0
        if num_closed > self._num_closed:
            self._num_closed = num_closed
            whole = content[: content.rindex(closing) + len(closing)]
            self._send_calls(self._codec.parse_calls(whole, self._rules)[1])

    def _begin(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._sink(self._start)

    def _send(self, kind: type[ReasoningDelta] | type[TextDelta], whole: str) -> None:
        """Send what `whole` has beyond what was sent."""
        sent = self._sent[kind]
        if len(whole) > len(sent):
            self._begin()
            self._has_sent = True
            self._sink(kind(whole[len(sent) :]))
            self._sent[kind] = whole

    def _send_rest(self, kind: type[ReasoningDelta] | type[TextDelta], whole: str) -> None:
        """Send the rest of a final text; what was sent may begin with white space that parsers strip."""
        sent = self._sent[kind]
        if not whole.startswith(sent):
            sent = self._sent[kind] = sent.lstrip()
        if whole.startswith(sent):
            self._send(kind, whole)
        else:
            logger.warning("a streamed %s is not how the message of its tokens begins", kind.__name__)

    def _send_calls(self, calls: Sequence[ToolCall]) -> None:
        for index in range(self._num_calls, len(calls)):
            self._begin()
            self._has_sent = True
            self._sink(CallDelta(index, calls[index]))
        self._num_calls = max(self._num_calls, len(calls))


def safe_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the text without an end that may begin one of the markers.

    Example: `safe_length("a <tool", ("<tool_call>",))` is 2.
    """
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return len(text) - length
    return len(text)
