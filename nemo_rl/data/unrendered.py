"""Conversations without tokens, for servers that take messages and render them themselves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.types import Message, MessageLog, TokenizedMessage


class TextOnlyChatEncoder(ChatEncoder):
    """Stands where an encoder stands: every message is text alone, and only the server knows what fits."""

    is_rendered_by_server = True

    def __init__(self) -> None:
        """Needs no tokenizer."""

    @property
    def vocab_size(self) -> int:
        return 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The server ends turns."""
        return ()

    def check(self, roles: Iterable[str] = ()) -> None:
        """Nothing is known of the template."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> MessageLog:
        return tuple(TokenizedMessage(message, ()) for message in messages)

    def prompt_fits(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], max_tokens: int) -> bool:
        return True

    def encode_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> MessageLog:
        return tuple(TokenizedMessage(message, ()) for message in new_messages)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Responses come as text."""
        raise ValueError("the tokens of this server are not known")
