"""Text of a response -> thinking, tool calls, and the rest; one pure function a syntax, found by name.

What cannot be parsed stays in the text, so that nothing a model wrote is lost to the agent.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from nemo_rl.errors import ConfigError

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as the model wrote it, not yet with an id."""

    name: str
    arguments: str  # JSON


ToolParser: TypeAlias = Callable[[str], tuple[str, tuple[ParsedCall, ...]]]  # text -> (text left, calls)
ReasoningParser: TypeAlias = Callable[[str], tuple[str | None, str]]  # text -> (thinking, text left)


def parse_hermes(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen 2.5 and 3 write it.

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
    """A response that is nothing but `{"name": ..., "parameters": {...}}`, as Llama 3.1 and later write it."""
    call = _parse_call(text, arguments_key="parameters")
    return (text, ()) if call is None else ("", (call,))


def parse_think(text: str) -> tuple[str | None, str]:
    """`<think>...</think>` at the start; the opening tag may stand in the prompt, the closing one may be cut off."""
    opened = text.lstrip().startswith(THINK_OPEN)
    thinking, closed, rest = text.partition(THINK_CLOSE)
    if not opened and not closed:
        return None, text
    if opened:
        thinking = thinking.lstrip().removeprefix(THINK_OPEN)
    return thinking.strip(), rest.lstrip()


def strip_thinking(text: str) -> str:
    """What is left of an assistant's text when its thinking is dropped, by whichever side drops it."""
    return parse_think(text)[1]


TOOL_PARSERS: Mapping[str, ToolParser] = {"hermes": parse_hermes, "llama3_json": parse_llama3_json}
REASONING_PARSERS: Mapping[str, ReasoningParser] = {"think": parse_think}


def tool_parser(name: str | None) -> ToolParser | None:
    """The parser of that name; None: calls stay text. Raises ConfigError for an unknown name."""
    if name is not None and name not in TOOL_PARSERS:
        raise ConfigError("gateway.tool_parser", name, "unknown parser", known=TOOL_PARSERS)
    return None if name is None else TOOL_PARSERS[name]


def reasoning_parser(name: str | None) -> ReasoningParser | None:
    """The parser of that name; None: thinking stays text. Raises ConfigError for an unknown name."""
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
