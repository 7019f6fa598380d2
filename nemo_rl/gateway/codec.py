"""Between an agent's messages and the engine's tokens: what a request is encoded to, and what a response says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.errors import ConfigError
from nemo_rl.gateway.parsers import reasoning_parser, tool_parser
from nemo_rl.types import Message, MessageLog, ToolCall

CALL_ID_CHARACTERS = 9  # letters and digits alone: Mistral's templates insist on both


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A sampled response as an agent sees it."""

    message: Message  # without thinking
    reasoning: str | None = None


class Codec:
    """A chat encoder with the parsers of the run's configuration. Free of state that a request could change."""

    def __init__(
        self, encoder: ChatEncoder, *, tool_parser_name: str | None = None, reasoning_parser_name: str | None = None
    ) -> None:
        """Raises ConfigError for unknown parsers."""
        self.encoder = encoder
        self._parse_tools = tool_parser(tool_parser_name)
        self._parse_reasoning = reasoning_parser(reasoning_parser_name)
        self._has_checked_tool_role = False

    def encode_first_turn(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> MessageLog:
        """A conversation from its start. Raises ConfigError when the template refuses it or would drop a message."""
        if not self._has_checked_tool_role and any(message.role == "tool" for message in messages):
            self.encoder.check(("tool",))
            self._has_checked_tool_role = True
        return self.encoder.encode_prompt(messages, tools)

    def encode_next_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> MessageLog | None:
        """What to append to a history that ends with a sampled message; None where the template cannot go on so."""
        try:
            return self.encoder.encode_turn(message_log, new_messages, tools)
        except ConfigError:
            return None

    def read(
        self, token_ids: Sequence[int], *, call_id_seed: str, stop_strings: Sequence[str] = (), with_tools: bool = True
    ) -> ParsedResponse:
        """What sampled tokens say: cut at the first stop string, thinking apart, tool calls parsed.

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
