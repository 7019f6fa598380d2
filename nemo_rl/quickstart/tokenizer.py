"""Tokenizers of characters, with the words of the quickstart's question as tokens of their own."""

import string
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TURN_START, TURN_END, PADDING, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|unknown|>"
QUESTION_TOKENS = ("Spell", " this", " word", " backward", " (", "example", ": ", " ->", " nus", ")")
ROLE_TOKENS = ("system", "user", "assistant", "tool")
CHARACTERS = (*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{TURN_START}' + message['role'] + '\\n' + message['content'] + '{TURN_END}\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{TURN_START}assistant\\n' }}}}{{% endif %}}"
)


# Two letters each, the more frequent ones in English; a text is read from the left.
FREQUENT_PAIRS = "thheineranreonatenndtiesorteofedisitalarsttontngsehaasouiolevecomedehiriroicneearacelichllbemasiomur"
LETTER_PAIRS = tuple(FREQUENT_PAIRS[i : i + 2] for i in range(0, len(FREQUENT_PAIRS), 2))
PAIRS_TURN_END, PAIRS_PADDING, PAIRS_UNKNOWN = "<|end|>", "<|pad|>", "<|unk|>"
PAIRS_TURN_STARTS = ("<|user|>", "<|assistant|>")
PAIRS_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '<|' + message['role'] + '|>\n' + message['content'] + '{PAIRS_TURN_END}\n' }}}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A ChatML tokenizer of about 120 tokens; characters beyond printable ASCII are one unknown token."""
    return _tokenizer(
        (PADDING, TURN_START, TURN_END, UNKNOWN),
        (*QUESTION_TOKENS, *ROLE_TOKENS),
        eos_token=TURN_END,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
    )


def make_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Another family's: tokens of two letters beside those of one, other special tokens, another template."""
    return _tokenizer(
        (PAIRS_PADDING, *PAIRS_TURN_STARTS, PAIRS_TURN_END, PAIRS_UNKNOWN),
        (*QUESTION_TOKENS, *ROLE_TOKENS, *LETTER_PAIRS),
        eos_token=PAIRS_TURN_END,
        pad_token=PAIRS_PADDING,
        unk_token=PAIRS_UNKNOWN,
        additional_special_tokens=list(PAIRS_TURN_STARTS),
        chat_template=PAIRS_CHAT_TEMPLATE,
    )


def _tokenizer(
    special: Sequence[str], multi_char_tokens: Sequence[str], *, unk_token: str, **options: Any
) -> PreTrainedTokenizerFast:
    """Pieces where the text has them, the longest first; else single characters."""
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys((*special, *multi_char_tokens, *CHARACTERS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk_token))
    longest_first = "|".join(_escape_parentheses(piece) for piece in sorted(multi_char_tokens, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{longest_first}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unk_token,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
        **options,
    )


def _escape_parentheses(piece: str) -> str:
    return "".join("\\" + character if character in "()" else character for character in piece)
