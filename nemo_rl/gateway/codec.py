"""Codec between an agent's messages and the engine's tokens: requests are encoded, sampled responses are parsed."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.errors import ConfigError
from nemo_rl.types import Message, MessageLog, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
CALL_ID_CHARACTERS = 9  # letters and digits alone: Mistral's templates insist on both


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as the model wrote it, without an id."""

    name: str
    arguments: str  # JSON


ToolParser: TypeAlias = Callable[[str], tuple[str, tuple[ParsedCall, ...]]]  # text -> (text left, calls)
ReasoningParser: TypeAlias = Callable[[str], tuple[str | None, str]]  # text -> (thinking, text left)


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A sampled response as an agent sees it."""

    message: Message  # without thinking
    reasoning: str | None = None


class Codec:
    """A chat encoder with the parsers of the run's configuration; no request changes its state."""

    def __init__(
        self, encoder: ChatEncoder, *, tool_parser_name: str | None = None, reasoning_parser_name: str | None = None
    ) -> None:
        """Look up the parsers. Raises ConfigError for unknown names."""
        self.encoder = encoder
        self._parse_tools = find_tool_parser(tool_parser_name)
        self._parse_reasoning = find_reasoning_parser(reasoning_parser_name)
        self._has_checked_tool_role = False

    def encode_first_turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> MessageLog:
        """Encode a conversation from its start.

        Raises ConfigError when the template refuses it or would drop a message.
        """
        if not self._has_checked_tool_role and any(message.role == "tool" for message in messages):
            self.encoder.check(("tool",))
            self._has_checked_tool_role = True
        return self.encoder.encode_prompt(messages, tools)

    def encode_next_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> MessageLog | None:
        """Encode what follows a history that ends with a sampled message; None where the template cannot append it."""
        try:
            return self.encoder.encode_turn(message_log, new_messages, tools)
        except ConfigError:
            return None

    def read(
        self, token_ids: Sequence[int], *, call_id_seed: str, stop_strings: Sequence[str] = (), with_tools: bool = True
    ) -> ParsedResponse:
        """Parse sampled tokens: the text up to the first stop string, split into thinking, content and tool calls.

        The ids of the calls are a function of `call_id_seed`.
        """
        text = self.encoder.decode(token_ids)
        text = text[: min((at for stop in stop_strings if (at := text.find(stop)) >= 0), default=len(text))]
        reasoning = None
        if self._parse_reasoning is not None:
            reasoning, text = self._parse_reasoning(text)
        if self._parse_tools is None or not with_tools:
            return ParsedResponse(Message("assistant", text), reasoning)
        text, parsed = self._parse_tools(text)
        calls = tuple(
            ToolCall(_call_id(f"{call_id_seed}:{i}"), call.name, call.arguments) for i, call in enumerate(parsed)
        )
        return ParsedResponse(Message("assistant", text, calls), reasoning)


def _call_id(seed: str) -> str:
    return blake2b(seed.encode(), digest_size=CALL_ID_CHARACTERS).hexdigest()[:CALL_ID_CHARACTERS]


def parse_hermes(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen 2.5 and 3 write it.

    Example: `'Sure.<tool_call>{"name": "f", "arguments": {}}</tool_call>'` gives ("Sure.", one call of f).
    """
    calls: list[ParsedCall] = []

    def take(block: re.Match[str]) -> str:
        call = _parse_call(block.group(1), arguments_key="arguments")
        if call is None:
            return block.group()
        calls.append(call)
        return ""

    rest = HERMES_CALL.sub(take, text)
    return (rest.strip(), tuple(calls)) if calls else (text, ())


def parse_llama3_json(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Parse a response that is only `{"name": ..., "parameters": {...}}`, as Llama 3.1 and later write it."""
    call = _parse_call(text, arguments_key="parameters")
    return (text, ()) if call is None else ("", (call,))


def parse_think(text: str) -> tuple[str | None, str]:
    """Parse `<think>...</think>` at the start.

    The opening tag may be part of the prompt, and the closing one may be cut off.
    """
    opened = text.lstrip().startswith(THINK_OPEN)
    thinking, closed, rest = text.partition(THINK_CLOSE)
    if not opened and not closed:
        return None, text
    if opened:
        thinking = thinking.lstrip().removeprefix(THINK_OPEN)
    return thinking.strip(), rest.lstrip()


def strip_thinking(text: str) -> str:
    """Return an assistant's text without its thinking, so that texts compare equal whichever side dropped it."""
    return parse_think(text)[1]


TOOL_PARSERS: Mapping[str, ToolParser] = {"hermes": parse_hermes, "llama3_json": parse_llama3_json}
REASONING_PARSERS: Mapping[str, ReasoningParser] = {"think": parse_think}


def find_tool_parser(name: str | None) -> ToolParser | None:
    """Return the parser of that name (None: calls stay text). Raises ConfigError for an unknown name."""
    if name is not None and name not in TOOL_PARSERS:
        raise ConfigError("gateway.tool_parser", name, "unknown parser", known=TOOL_PARSERS)
    return None if name is None else TOOL_PARSERS[name]


def find_reasoning_parser(name: str | None) -> ReasoningParser | None:
    """Return the parser of that name (None: thinking stays text). Raises ConfigError for an unknown name."""
    if name is not None and name not in REASONING_PARSERS:
        raise ConfigError("gateway.reasoning_parser", name, "unknown parser", known=REASONING_PARSERS)
    return None if name is None else REASONING_PARSERS[name]


def _parse_call(text: str, *, arguments_key: str) -> ParsedCall | None:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get(arguments_key, {})
        arguments_json = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        (call["name"] + arguments_json).encode()  # half a surrogate pair, escaped in JSON, could not be sent back
    except (ValueError, RecursionError):
        return None
    return ParsedCall(call["name"], arguments_json)
