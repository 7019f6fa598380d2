"""A conversation as the tokens of a reward model: by its own tokenizer and template, a BOS never doubled."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nemo_rl.environments.adapters import plain_messages
from nemo_rl.errors import ConfigError
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
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError) as error:  # missing, not reachable, or of no known kind
            raise ConfigError(f"{key}.tokenizer_name", name, f"no tokenizer can be loaded from it: {error}") from error
        if chat_template is not None:
            is_text = "{" in chat_template
            if not is_text and not Path(chat_template).is_file():
                raise ConfigError(f"{key}.chat_template", chat_template, "neither a Jinja text nor a file")
            tokenizer.chat_template = chat_template if is_text else Path(chat_template).read_text(encoding="utf-8")
        if not tokenizer.chat_template:
            raise ConfigError(f"{key}.chat_template", None, f"the tokenizer of {name} has none: give a text or a file")
        return cls(tokenizer, max_length=max_length)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids, special tokens as the template writes them and no others. Raises ConversationTooLong."""
        text = self.tokenizer.apply_chat_template(plain_messages(messages), tokenize=False, add_generation_prompt=False)
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        if self._max_length is not None and len(token_ids) > self._max_length:
            raise ConversationTooLong(f"a conversation of {len(token_ids)} tokens, where {self._max_length} fit")
        return token_ids
