"""Markup in which models write thinking and tool calls: its parsers, its marks in a stream, guides to calls.

A name without an entry here is looked up among vLLM's parsers.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm.parsers import (
    Kind,
    make_vllm_reasoning_parser,
    make_vllm_tool_parser,
    vllm_parser_names,
)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TAGGED_REASONING = frozenset({"think"})  # reasoning parsers that read these tags
CODER_CALL = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
CODER_PARAMETER = re.compile(
    r"<parameter=([^<>\s]+)>\n?(.*?)(?:\n?</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ParsedCall(NamedTuple):
    """A tool call as the model wrote it, without an id."""

    name: str
    arguments: str  # JSON


Tools: TypeAlias = Sequence[Mapping[str, Any]]  # OpenAI schemas
ToolParser: TypeAlias = Callable[[str], tuple[str, tuple[ParsedCall, ...]]]  # text -> (text left, calls)
SchemaToolParser: TypeAlias = Callable[[str, Tools], tuple[str, Sequence[tuple[str, str]]]]  # the same, by the schemas
ReasoningParser: TypeAlias = Callable[[str], tuple[str | None, str]]  # text -> (thinking, text left)


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """One way to write tool calls."""

    parse: ToolParser
    opening: tuple[str, ...] = ()  # marks that begin a call; unknown: a stream holds all text to the end
    closing: str | None = None  # mark that ends a call; None: a stream holds calls to the end
    only_at_start: bool = False  # a call is the whole response
    guide: tuple[str, str, str] | None = None  # (trigger, mark before the arguments with NAME for the name, mark after)


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


def parse_qwen3_coder(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Parse `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    As Qwen3-Coder and Nemotron write it. A value that is JSON other than a string (a number, a list, true) is read as
    JSON, any other as a string.
    """
    calls = []
    for name, body in CODER_CALL.findall(text):
        arguments = {key: _read_value(value) for key, value in CODER_PARAMETER.findall(body)}
        calls.append(ParsedCall(name, json.dumps(arguments, ensure_ascii=False)))
    rest = HERMES_CALL.sub(lambda block: "" if CODER_CALL.search(block.group()) else block.group(), text)
    return (CODER_CALL.sub("", rest).strip(), tuple(calls)) if calls else (text, ())


def _read_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


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


def _parse_call(text: str, *, arguments_key: str) -> ParsedCall | None:
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return None
        arguments = call.get(arguments_key, {})
        arguments_json = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        (call["name"] + arguments_json).encode()  # raises for half a surrogate pair, which could not be sent back
    except (ValueError, RecursionError):
        return None
    return ParsedCall(call["name"], arguments_json)


CALL_MARKUP: Mapping[str, CallMarkup] = {
    "hermes": CallMarkup(
        parse_hermes,
        ("<tool_call>",),
        "</tool_call>",
        guide=("<tool_call>", '<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    ),
    "llama3_json": CallMarkup(
        parse_llama3_json,
        ("{",),
        only_at_start=True,
        guide=('{"name"', '{"name": NAME, "parameters": ', "}"),
    ),
    "qwen3_coder": CallMarkup(parse_qwen3_coder, ("<tool_call>", "<function="), "</function>"),
}
REASONING_PARSERS: Mapping[str, ReasoningParser] = {"think": parse_think}


def find_tool_parser(name: str | None, encoder: ChatEncoder | None = None) -> SchemaToolParser | None:
    """Return the parser of that name, our own if there is one, else vLLM's; None if calls stay text.

    Raises ConfigError for an unknown name, and for a vLLM parser that does not work with this tokenizer.
    """
    if name is None:
        return None
    if name in CALL_MARKUP:
        return lambda text, tools: CALL_MARKUP[name].parse(text)
    key = "gateway.tool_parser"
    return make_vllm_tool_parser(key, name, _tokenizer_for_vllm(key, name, "tool", CALL_MARKUP, encoder))


def find_reasoning_parser(name: str | None, encoder: ChatEncoder | None = None) -> ReasoningParser | None:
    """Return the parser of that name, as `find_tool_parser` does; None if thinking stays text."""
    if name is None:
        return None
    if name in REASONING_PARSERS:
        return REASONING_PARSERS[name]
    key = "gateway.reasoning_parser"
    return make_vllm_reasoning_parser(
        key, name, _tokenizer_for_vllm(key, name, "reasoning", REASONING_PARSERS, encoder)
    )


def _tokenizer_for_vllm(
    key: str, name: str, kind: Kind, own: Mapping[str, Any], encoder: ChatEncoder | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer for a vLLM parser; raises ConfigError for an unknown name, or without a tokenizer."""
    names = (*own, *(each for each in vllm_parser_names(kind) if each not in own))
    if name not in names:
        raise ConfigError(key, name, "unknown parser", known=names)
    if encoder is None or encoder.tokenizer is None:
        raise ConfigError(key, name, "vLLM's parsers need the model's tokenizer")
    return encoder.tokenizer
