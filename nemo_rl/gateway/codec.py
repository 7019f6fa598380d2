"""Codec between an agent's messages and the engine's tokens: requests are encoded, sampled responses are parsed."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm.parsers import (
    Kind,
    make_vllm_reasoning_parser,
    make_vllm_tool_parser,
    vllm_parser_names,
)
from nemo_rl.types import Guide, Message, MessageLog, TextPart, ThinkingPart, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MAX_TAG_TOKENS = 16  # that a thinking tag and the white space after it take
CODER_CALL = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
CODER_PARAMETER = re.compile(
    r"<parameter=([^>\s]+)>\n?(.*?)(?:\n?</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
CALL_ID_CHARACTERS = 9  # letters and digits alone: Mistral's templates insist on both


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as the model wrote it, without an id."""

    name: str
    arguments: str  # JSON


Tools: TypeAlias = Sequence[Mapping[str, Any]]  # OpenAI schemas
ToolParser: TypeAlias = Callable[[str], tuple[str, tuple[ParsedCall, ...]]]  # text -> (text left, calls)
SchemaToolParser: TypeAlias = Callable[[str, Tools], tuple[str, tuple[ParsedCall, ...]]]  # the same, by the schemas
ReasoningParser: TypeAlias = Callable[[str], tuple[str | None, str]]  # text -> (thinking, text left)


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A sampled response as an agent sees it."""

    message: Message  # thinking, text, calls
    stop_string: str | None = None  # that ended it

    @property
    def reasoning(self) -> str | None:
        """Return the thinking; None where no parser found any."""
        return self.message.thinking


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """The conditions of reading a response, beside its tokens."""

    call_id_seed: str  # the ids of its tool calls are a function of this
    stop_strings: tuple[str, ...] = ()
    with_tools: bool = True
    with_parallel_calls: bool = True  # False: calls after the first are dropped from the message
    is_thinking: bool = False  # the prompt has opened the thinking
    tools: Tools = ()  # tell some parsers the types of arguments


class Codec:
    """A chat encoder with the parsers of the run's configuration; no request changes its state."""

    def __init__(
        self, encoder: ChatEncoder, *, tool_parser_name: str | None = None, reasoning_parser_name: str | None = None
    ) -> None:
        """Look up the parsers. Raises ConfigError for unknown names."""
        self.encoder = encoder
        self.tool_parser_name = tool_parser_name
        self.reasoning_parser_name = reasoning_parser_name
        self._parse_tools = find_tool_parser(tool_parser_name, encoder)
        self._parse_reasoning = find_reasoning_parser(reasoning_parser_name, encoder)
        # vLLM's parsers look for special tokens, which the text for agents is without.
        is_own = tool_parser_name in (None, *TOOL_PARSERS) and reasoning_parser_name in (None, *REASONING_PARSERS)
        self._keeps_special = not is_own
        self._has_checked_tool_role = False

    def encode_first_turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> MessageLog:
        """Encode a conversation from its start.

        Thinking of a history is not rendered: many templates drop it, and a history must read the same whether its
        client sends thinking back or not. Raises ConfigError when the template refuses it or would drop a message.
        """
        if not self._has_checked_tool_role and any(message.role == "tool" for message in messages):
            self.encoder.check(("tool",))
            self._has_checked_tool_role = True
        return self.encoder.encode_prompt(_without_thinking(messages), tools)

    def encode_next_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> MessageLog | None:
        """Encode what follows a history that ends with a sampled message; None where the template cannot append it."""
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
            # A closing tag that was never opened is text: the deltas before it cannot be taken back from a stream.
            if self.reasoning_parser_name not in TAGGED_REASONING or text.lstrip().startswith(THINK_OPEN):
                reasoning, text = self._parse_reasoning(text)
        calls: tuple[ToolCall, ...] = ()
        if rules.with_tools:
            if self.tool_parser_name in TOOL_PARSERS:
                text = self._clean(text)  # our own parsers know no special tokens
            text, calls = self.parse_calls(text, rules)
        thinking = () if reasoning is None else (ThinkingPart(self._clean(reasoning)),)
        return ParsedResponse(Message("assistant", (*thinking, TextPart(self._clean(text)), *calls)), stop)

    def parse_calls(self, text: str, rules: ReadingRules) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text without its tool calls, and these."""
        if self._parse_tools is None:
            return text, ()
        text, parsed = self._parse_tools(text, rules.tools)
        parsed = parsed if rules.with_parallel_calls else parsed[:1]
        return text, tuple(
            ToolCall(_call_id(f"{rules.call_id_seed}:{i}"), call.name, call.arguments) for i, call in enumerate(parsed)
        )

    def call_guide(self, tools: Tools, names: Sequence[str], *, is_required: bool) -> Guide | None:
        """Return the guide to calls of the named tools by their schemas; None for a parser without an entry below.

        `is_required`: the response is one call; else it may be a text with any number of them.
        """
        markup = CALL_GUIDES.get(self.tool_parser_name or "")
        if markup is None:
            return None
        trigger, begin, end = markup
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
        """Return whether a prompt ends with an opening tag that the response is to close."""
        if self.reasoning_parser_name not in REASONING_PARSERS:
            return False  # vLLM's parsers decide by themselves
        tail = self.encoder.decode(prompt_token_ids[-MAX_TAG_TOKENS:], keep_special=True)
        return tail.rstrip().endswith(THINK_OPEN)

    def takes_for_thinking(self, guide: Guide) -> bool:
        """Return whether a parser of vLLM's reads responses to this guide, which have no tags, as thinking.

        Many do with any text before a closing tag; some end the thinking at the first call.
        """
        if self._parse_reasoning is None or self.reasoning_parser_name in REASONING_PARSERS:
            return False
        text = "{}"
        if guide.kind == "structural_tag":
            tag = json.loads(guide.text)["format"]["tags"][0]
            text = f"{tag['begin']}{{}}{tag['end']}"
        return not self._parse_reasoning(text)[1].strip()

    def _clean(self, text: str) -> str:
        """Return content without special tokens that were kept for the parsers."""
        return self.encoder.strip_special(text) if self._keeps_special else text


def _without_thinking(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(message.without_thinking() for message in messages)


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


def parse_qwen3_coder(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Parse `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    As Qwen3-Coder and Nemotron write it. A value that is JSON other than a text (a number, a list, true) is taken as
    such; any other is a text.
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


TOOL_PARSERS: Mapping[str, ToolParser] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "qwen3_coder": parse_qwen3_coder,
}
REASONING_PARSERS: Mapping[str, ReasoningParser] = {"think": parse_think}
# How a call begins, before and after the name, and ends around its arguments; the engine is guided by these.
CALL_GUIDES: Mapping[str, tuple[str, str, str]] = {
    "hermes": ("<tool_call>", '<tool_call>\n{"name": NAME, "arguments": ', "}\n</tool_call>"),
    "llama3_json": ('{"name"', '{"name": NAME, "parameters": ', "}"),
}
ANY_OBJECT = {"type": "object"}
TAGGED_REASONING = frozenset({"think"})  # parsers of <think>...</think>


def find_tool_parser(name: str | None, encoder: ChatEncoder | None = None) -> SchemaToolParser | None:
    """Return the parser of that name (None: calls stay text), of vLLM's registry where there is none of our own.

    Raises ConfigError for a name that neither knows, and for a parser of vLLM's that cannot read this tokenizer.
    """
    if name is None:
        return None
    if name in TOOL_PARSERS:
        return lambda text, tools: TOOL_PARSERS[name](text)
    key = "gateway.tool_parser"
    _check_known(key, name, "tool", TOOL_PARSERS)
    parse = make_vllm_tool_parser(key, name, _tokenizer_of(key, name, encoder))

    def parse_by_schema(text: str, tools: Tools) -> tuple[str, tuple[ParsedCall, ...]]:
        left, calls = parse(text, tools)
        return left, tuple(ParsedCall(called, arguments) for called, arguments in calls)

    return parse_by_schema


def find_reasoning_parser(name: str | None, encoder: ChatEncoder | None = None) -> ReasoningParser | None:
    """Return the parser of that name (None: thinking stays text), as `find_tool_parser` does."""
    if name is None or name in REASONING_PARSERS:
        return None if name is None else REASONING_PARSERS[name]
    key = "gateway.reasoning_parser"
    _check_known(key, name, "reasoning", REASONING_PARSERS)
    return make_vllm_reasoning_parser(key, name, _tokenizer_of(key, name, encoder))


def _tokenizer_of(key: str, name: str, encoder: ChatEncoder | None) -> PreTrainedTokenizerBase:
    tokenizer = None if encoder is None else encoder.tokenizer
    if tokenizer is None:
        raise ConfigError(key, name, "a parser of vLLM's needs the model's tokenizer")
    return tokenizer


def _check_known(key: str, name: str, kind: Kind, own: Mapping[str, Any]) -> None:
    names = (*own, *_vllm_only(kind))
    if name not in names:
        raise ConfigError(key, name, "unknown parser", known=names)


def _vllm_only(kind: Kind) -> tuple[str, ...]:
    """Return vLLM's names that no parser of our own has."""
    own = TOOL_PARSERS if kind == "tool" else REASONING_PARSERS
    return tuple(name for name in vllm_parser_names(kind) if name not in own)


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
