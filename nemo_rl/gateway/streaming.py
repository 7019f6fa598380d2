"""Deltas of a response while its tokens are sampled.

A delta never splits a character and never holds text that a parser may still take: text that may begin a stop string,
a thinking tag or a tool call is held back until that is decided. If a parser's markup is not in markup.py, all text is
held to the end of the response. The stream starts with the first token. After the first delta, tokens are read in
batches, one per interval: reading and sending each token alone would cost the server several times as much as the rest
of the call. The interval grows with the number of running calls.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.gateway.calls import CallDelta, ReasoningDelta, Sink, StreamStart, TextDelta
from nemo_rl.gateway.codec import Codec, ParsedResponse, ReadingRules
from nemo_rl.gateway.markup import CALL_MARKUP, TAGGED_REASONING, THINK_CLOSE, THINK_OPEN
from nemo_rl.gateway.request_errors import EngineError
from nemo_rl.types import Completion, ToolCall

logger = logging.getLogger(__name__)

INTERVAL_S, MAX_INTERVAL_S = 0.05, 0.25  # between the deltas of a stream; the longest wait of a token
DELTAS_PER_S = 320  # all streams of a server together, as far as the intervals allow; each costs about 50 us
UNDECIDED = "\ufffd"  # written by decoders for the bytes of an incomplete character


CallLater: TypeAlias = Callable[[float, Callable[[], None]], asyncio.TimerHandle]  # (seconds, callback)


def choose_interval_s(num_calls: int) -> float:
    """Return the seconds between the deltas of each stream while `num_calls` calls run.

    Example: 0.05 s for 16 calls, 0.2 s for 64.
    """
    return min(max(INTERVAL_S, num_calls / DELTAS_PER_S), MAX_INTERVAL_S)


class TokenDecoder:
    """Decodes tokens as they come; the bytes of an incomplete character wait for the rest."""

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder
        self._token_ids: list[int] = []
        self._window = 0  # index from which decoding starts: a token's text may depend on the token before it
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

    A context manager that stops its timer on exit.
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
        """Make a stream; `interval_s` returns the seconds to the next reading and is called at each reading.

        `call_later` is the event loop's; without it, held tokens are read when the next one comes.
        """
        self._codec, self._start, self._sink, self._rules = codec, start, sink, rules
        self._interval_s, self._clock, self._call_later = interval_s, clock, call_later
        self._timer: asyncio.TimerHandle | None = None
        self._next_read_at = 0.0  # time of `clock`
        self._decoder = TokenDecoder(codec.encoder)
        self._fed: list[int] = []
        self._num_read = 0  # fed tokens that were read
        self._error: Exception | None = None  # raised by a reading; kept because the event loop would swallow it
        self._text = ""
        self._sent = {ReasoningDelta: "", TextDelta: ""}
        self._num_calls = 0
        self._num_closed = 0  # closing tags seen
        self._has_started = False
        self._has_sent = False  # a delta after the start
        tool_parser = codec.tool_parser_name if rules.with_tools else None
        reasoning_parser = codec.reasoning_parser_name
        self._markup = CALL_MARKUP.get(tool_parser or "")
        has_known_marks = tool_parser is None or (self._markup is not None and bool(self._markup.opening))
        self._holds_all = not has_known_marks or reasoning_parser not in (None, *TAGGED_REASONING)
        self._thinking_start = 0 if rules.is_thinking and reasoning_parser is not None else None
        self._content_start = 0 if reasoning_parser is None else None  # None if not known yet

    def feed(self, start: int, token_ids: Sequence[int]) -> None:
        """Take tokens, the first of which has index `start`; tokens that an engine sends again are skipped.

        Raises the error of this reading or of an earlier one that the timer started.
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
        """Read the tokens fed since the last reading; keep an error for `_raise_error`."""
        self._stop_timer()
        self._next_read_at = self._clock() + self._interval_s()
        try:
            self._read(self._fed[self._num_read :])
        except Exception as error:  # from the tokenizer, a parser or the sink  # noqa: BLE001
            self._error = error
        else:
            self._num_read = len(self._fed)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _read(self, token_ids: Sequence[int]) -> None:
        """Send the text and calls that these tokens decide."""
        self._text += self._decoder.feed(token_ids)
        text, is_ended = self._before_stop()
        if self._content_start is None:
            self._read_thinking(text, is_ended=is_ended)
        if self._content_start is not None:
            self._read_content(text, self._content_start)

    def finish(self, completion: Completion, response: ParsedResponse) -> None:
        """Send the rest of the response.

        Raises EngineError if the streamed tokens differ from the completion's, and the error of a reading.
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
        """Return the text before a stop string, or before a possible beginning of one, and whether one was found."""
        found = [at for stop in self._rules.stop_strings if (at := self._text.find(stop)) >= 0]
        if found:
            return self._text[: min(found)], True
        return self._text[: safe_length(self._text, self._rules.stop_strings)], False

    def _read_thinking(self, text: str, *, is_ended: bool) -> None:
        if self._thinking_start is None:
            opening = text.lstrip()
            if THINK_OPEN.startswith(opening):
                return  # the tag may still be completed
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
        """Send the part of `whole` that was not sent yet."""
        sent = self._sent[kind]
        if len(whole) > len(sent):
            self._begin()
            self._has_sent = True
            self._sink(kind(whole[len(sent) :]))
            self._sent[kind] = whole

    def _send_rest(self, kind: type[ReasoningDelta] | type[TextDelta], whole: str) -> None:
        """Send the rest of a final text; the sent part may begin with white space that parsers strip."""
        sent = self._sent[kind]
        if not whole.startswith(sent):
            sent = self._sent[kind] = sent.lstrip()
        if whole.startswith(sent):
            self._send(kind, whole)
        else:
            logger.warning("streamed %s differs from the parsed message; not sending the rest", kind.__name__)

    def _send_calls(self, calls: Sequence[ToolCall]) -> None:
        for index in range(self._num_calls, len(calls)):
            self._begin()
            self._has_sent = True
            self._sink(CallDelta(index, calls[index]))
        self._num_calls = max(self._num_calls, len(calls))


def safe_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the text before an end that may begin one of the markers.

    Example: `safe_length("a <tool", ("<tool_call>",))` is 2.
    """
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return len(text) - length
    return len(text)
