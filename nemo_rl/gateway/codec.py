"""Codec between an agent's messages and the engine's tokens: requests are encoded, sampled responses are parsed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.errors import ConfigError
from nemo_rl.gateway.markup import (
    CALL_MARKUP,
    REASONING_PARSERS,
    TAGGED_REASONING,
    THINK_OPEN,
    Tools,
    find_reasoning_parser,
    find_tool_parser,
)
from nemo_rl.types import Guide, Message, MessageLog, TextPart, ThinkingPart, ToolCall

MAX_TAG_TOKENS = 16  # longest thinking tag with the white space after it
ANY_OBJECT = {"type": "object"}  # JSON schema of a tool without one
CALL_ID_CHARACTERS = 9  # only letters and digits: Mistral's templates insist on both


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A sampled response as an agent sees it."""

    message: Message  # thinking, text, calls
    stop_string: str | None = None  # stop string that ended the response

    @property
    def reasoning(self) -> str | None:
        """Return the thinking; None if no parser found any."""
        return self.message.thinking


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Everything besides its tokens that decides how a response is read."""

    call_id_seed: str  # determines the ids of tool calls
    stop_strings: tuple[str, ...] = ()
    with_tools: bool = True
    with_parallel_calls: bool = True  # False: calls after the first are dropped from the message
    is_thinking: bool = False  # the prompt ends with an opening thinking tag
    tools: Tools = ()  # some parsers read argument types from the schemas


class Codec:
    """A chat encoder with the configured parsers; requests do not change its state."""

    def __init__(
        self, encoder: ChatEncoder, *, tool_parser_name: str | None = None, reasoning_parser_name: str | None = None
    ) -> None:
        """Look up the parsers. Raises ConfigError for unknown names."""
        self.encoder = encoder
        self.tool_parser_name = tool_parser_name
        self.reasoning_parser_name = reasoning_parser_name
        self._parse_tools = find_tool_parser(tool_parser_name, encoder)
        self._parse_reasoning = find_reasoning_parser(reasoning_parser_name, encoder)
        # vLLM's parsers look for special tokens, which agents' text lacks.
        is_own = tool_parser_name in (None, *CALL_MARKUP) and reasoning_parser_name in (None, *REASONING_PARSERS)
        self._keeps_special = not is_own
        self._has_checked_tool_role = False

    def encode_first_turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> MessageLog:
        """Encode a conversation from its start.

        Thinking in a history is not rendered: many templates drop it, and a history must read the same whether or not
        the client sends thinking back. Raises ConfigError if the template refuses or would drop a message.
        """
        if not self._has_checked_tool_role and any(message.role == "tool" for message in messages):
            self.encoder.check(("tool",))
            self._has_checked_tool_role = True
        return self.encoder.encode_prompt(_without_thinking(messages), tools)

    def encode_next_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> MessageLog | None:
        """Encode the messages after a sampled one; return None if the template cannot append them."""
        try:
            return self.encoder.encode_turn(message_log, _without_thinking(new_messages), tools)
        except ConfigError:
            return None

    def read(self, token_ids: Sequence[int], rules: ReadingRules) -> ParsedResponse:
        """Parse sampled tokens: the text up to the first stop string, split into thinking, content and tool calls."""
        text = self.encoder.decode(token_ids, keep_special=self._keeps_special)
        found = [(at, stop) for stop in rules.stop_strings if (at := text.find(stop)) >= 0]
        at, stop = min(found, default=(len(text), None))
        text = text[:at]
        reasoning = None
        if self._parse_reasoning is not None:
            if rules.is_thinking and not text.lstrip().startswith(THINK_OPEN):
                text = f"{THINK_OPEN}{text}"
            # A closing tag without an opening one is text: a stream cannot take back the deltas before it.
            if self.reasoning_parser_name not in TAGGED_REASONING or text.lstrip().startswith(THINK_OPEN):
                reasoning, text = self._parse_reasoning(text)
        calls: tuple[ToolCall, ...] = ()
        if rules.with_tools:
            if self.tool_parser_name in CALL_MARKUP:
                text = self._clean(text)  # our own parsers expect no special tokens
            text, calls = self.parse_calls(text, rules)
        thinking = () if reasoning is None else (ThinkingPart(self._clean(reasoning)),)
        return ParsedResponse(Message("assistant", (*thinking, TextPart(self._clean(text)), *calls)), stop)

    def parse_calls(self, text: str, rules: ReadingRules) -> tuple[str, tuple[ToolCall, ...]]:
        """Split a text into the text around its tool calls and the calls."""
        if self._parse_tools is None:
            return text, ()
        text, parsed = self._parse_tools(text, rules.tools)
        parsed = parsed if rules.with_parallel_calls else parsed[:1]
        seeds = (f"{rules.call_id_seed}:{i}" for i in range(len(parsed)))
        return text, tuple(ToolCall(_call_id(seed), *call) for seed, call in zip(seeds, parsed, strict=True))

    def call_guide(self, tools: Tools, names: Sequence[str], *, is_required: bool) -> Guide | None:
        """Return the guide to calls of the named tools by their schemas; None if the parser's markup has no guide.

        `is_required`: the response is one call; otherwise it may be text with any number of calls.
        """
        markup = CALL_MARKUP.get(self.tool_parser_name or "")
        if markup is None or markup.guide is None:
            return None
        trigger, begin, end = markup.guide
        tags = [
            {
                "type": "tag",
                "begin": begin.replace("NAME", json.dumps(tool["function"]["name"], ensure_ascii=False)),
                "content": {"type": "json_schema", "json_schema": tool["function"].get("parameters") or ANY_OBJECT},
                "end": end,
            }
            for tool in tools
            if tool["function"]["name"] in names
        ]
        form: dict[str, Any] = {"type": "triggered_tags", "triggers": [trigger], "tags": tags}
        form |= {"at_least_one": is_required, "stop_after_first": is_required}
        return Guide("structural_tag", json.dumps({"type": "structural_tag", "format": form}))

    def opens_thinking(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with an opening thinking tag, which the response then closes."""
        if self.reasoning_parser_name not in REASONING_PARSERS:
            return False  # vLLM's parsers decide by themselves
        tail = self.encoder.decode(prompt_token_ids[-MAX_TAG_TOKENS:], keep_special=True)
        return tail.rstrip().endswith(THINK_OPEN)

    def takes_for_thinking(self, guide: Guide) -> bool:
        """Return whether a vLLM parser would read a response to this guide, which has no thinking tags, as thinking.

        Many take any text before a closing tag for thinking; some end the thinking at the first call.
        """
        if self._parse_reasoning is None or self.reasoning_parser_name in REASONING_PARSERS:
            return False
        text = "{}"
        if guide.kind == "structural_tag":
            tag = json.loads(guide.text)["format"]["tags"][0]
            text = f"{tag['begin']}{{}}{tag['end']}"
        return not self._parse_reasoning(text)[1].strip()

    def _clean(self, text: str) -> str:
        """Remove special tokens that were kept for the parsers."""
        return self.encoder.strip_special(text) if self._keeps_special else text


def _without_thinking(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(message.without_thinking() for message in messages)


def _call_id(seed: str) -> str:
    return blake2b(seed.encode(), digest_size=CALL_ID_CHARACTERS).hexdigest()[:CALL_ID_CHARACTERS]
