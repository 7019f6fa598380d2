"""A conversation as the tokens of a reward model: by its own tokenizer and template, a BOS never doubled."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.tokenizer import load_tokenizer_with_template
from nemo_rl.environments.adapters import plain_messages
from nemo_rl.types import Message


class ConversationTooLong(Exception):
    """More tokens than the reward model takes."""


class ConversationTokens:
    """Renders whole conversations, without a prompt for a further answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._max_length = max_length

    @classmethod
    def load(
        cls, key: str, name: str, *, chat_template: str | None, max_length: int | None = None
    ) -> "ConversationTokens":
        """From the Hugging Face name or folder `name`; raises ConfigError below `key` where it cannot be used."""
        tokenizer = load_tokenizer_with_template(
            name, chat_template, name_key=f"{key}.tokenizer_name", template_key=f"{key}.chat_template"
        )
        return cls(tokenizer, max_length=max_length)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids, special tokens as the template writes them and no others. Raises ConversationTooLong."""
        text = self.tokenizer.apply_chat_template(plain_messages(messages), tokenize=False, add_generation_prompt=False)
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        if self._max_length is not None and len(token_ids) > self._max_length:
            raise ConversationTooLong(f"a conversation of {len(token_ids)} tokens, where {self._max_length} fit")
        return token_ids
