"""Tokens of whole conversations as reward models read them."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from transformers import (
    PreTrainedTokenizerBase,
)

from nemo_rl.data.tokenizer import load_tokenizer_with_template
from nemo_rl.environments.registry import messages_to_dicts
from nemo_rl.environments.scorers.checked_scorer import TOO_LONG
from nemo_rl.environments.scorers.reward_model import RenderingConfig
from nemo_rl.types import Message, ResponseFault

UNREADABLE = "unreadable_by_scorer"  # a response fault
FIRST_MARK = 0xF0000  # begins a private-use area, one character per special token
ANY_RESPONSE = Message("assistant", "x")  # accepted by every template and tokenizer


class ConversationTooLong(Exception):
    """A conversation has more tokens than the reward model accepts."""


class ConversationTokenizer:
    """Token ids of whole conversations, rendered without a generation prompt.

    Special tokens are the template's alone: a response, and what environments answer to it, that spell one are encoded
    as that text, since a policy could otherwise end its turn and write others that the reward model believes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_length: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._variables = dict(chat_template_kwargs or {})
        self._max_length = max_length
        added = tokenizer.added_tokens_decoder.values()
        self._special_texts = sorted({token.content for token in added if token.special}, key=len, reverse=True)

    @classmethod
    def load(
        cls, key: str, section: RenderingConfig, name: str, *, max_length: int | None = None
    ) -> "ConversationTokenizer":
        """Load the tokenizer that a scorer's section names, by default that of the model `name`.

        Raises ConfigError below `key`, the section's, if it cannot be used.
        """
        tokenizer = load_tokenizer_with_template(
            section.tokenizer_name or name,
            section.chat_template,
            name_key=f"{key}.tokenizer_name",
            template_key=f"{key}.chat_template",
        )
        return cls(tokenizer, chat_template_kwargs=section.chat_template_kwargs, max_length=max_length)

    def encode_response(self, messages: Sequence[Message]) -> list[int] | ResponseFault:
        """Return the token ids, or the fault of a response that breaks the template or tokenizer, or is too long.

        Raises what the template raises for its prompt with another response, too, and ConversationTooLong.
        """
        try:
            return self.encode(messages)
        except Exception as error:  # a template may raise anything  # noqa: BLE001
            prompt = takewhile(lambda message: message.role != "assistant", messages)
            self.encode((*prompt, ANY_RESPONSE))
            return ResponseFault(TOO_LONG if isinstance(error, ConversationTooLong) else UNREADABLE)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids, with the template's special tokens and no others; raises ConversationTooLong."""
        length_of_prompt = sum(1 for _ in takewhile(lambda message: message.role != "assistant", messages))
        dicts = messages_to_dicts(messages)
        dicts = [*dicts[:length_of_prompt], *map(self._mark, dicts[length_of_prompt:])]
        text = self.tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=False, **self._variables)
        token_ids = self._encode_marked(str(text))
        if self._max_length is not None and len(token_ids) > self._max_length:
            raise ConversationTooLong(f"a conversation of {len(token_ids)} tokens, where {self._max_length} fit")
        return token_ids

    def _mark(self, value: Any) -> Any:
        """Return a part of a message with a mark in place of each text of a special token."""
        if isinstance(value, str):
            for index, special in enumerate(self._special_texts):
                value = value.replace(special, chr(FIRST_MARK + index))
            return value
        if isinstance(value, dict):
            return {key: self._mark(part) for key, part in value.items()}
        return [self._mark(part) for part in value] if isinstance(value, list) else value

    def _encode_marked(self, text: str) -> list[int]:
        marks = f"([{chr(FIRST_MARK)}-{chr(FIRST_MARK + max(len(self._special_texts) - 1, 0))}])"
        pieces = re.split(marks, text) if self._special_texts else [text]
        token_ids: list[int] = []
        for index, piece in enumerate(pieces):
            is_mark = index % 2 == 1
            spelled = self._special_texts[ord(piece) - FIRST_MARK] if is_mark else piece
            encoded = self.tokenizer(spelled, add_special_tokens=False, split_special_tokens=is_mark)
            token_ids += encoded["input_ids"]  # type: ignore[operator]
        return token_ids
