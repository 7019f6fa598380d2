"""A chat encoder without a tokenizer: a character is a token, and each message stands between two marks."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.types import Message, MessageLog, TokenizedMessage

END, BEGIN, FIRST_CHARACTER = 0, 1, 2  # token ids; END is the stop token
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
VOCAB_SIZE = FIRST_CHARACTER + len(ALPHABET)


class FakeEncoder(ChatEncoder):
    """Encodes in a microsecond what a real encoder needs a template for; counts the prompts it has encoded."""

    def __init__(self) -> None:
        self.num_prompts = 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (END,)

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def check(self) -> None:
        """Nothing can be wrong."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> MessageLog:
        self.num_prompts += 1
        return _on_the_last(messages)

    def encode_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> MessageLog:
        return _on_the_last(new_messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(ALPHABET[i - FIRST_CHARACTER] for i in token_ids if i >= FIRST_CHARACTER)


def _on_the_last(messages: Sequence[Message]) -> MessageLog:
    """Encode a segment: all its tokens belong to its last message; the mark at the end requests a response."""
    token_ids = [BEGIN]
    for message in messages:
        token_ids += [ALPHABET.index(c) + FIRST_CHARACTER for c in message.content if c in ALPHABET]
        token_ids.append(BEGIN)
    earlier = tuple(TokenizedMessage(message, ()) for message in messages[:-1])
    return (*earlier, TokenizedMessage(messages[-1], tuple(token_ids)))
