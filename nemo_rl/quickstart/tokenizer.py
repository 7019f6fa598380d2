"""A tokenizer of characters, with the words of the quickstart's question as tokens of their own."""

import string

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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A ChatML tokenizer of about 120 tokens; characters beyond printable ASCII are one unknown token."""
    special = (PADDING, TURN_START, TURN_END, UNKNOWN)
    pieces = (*QUESTION_TOKENS, *ROLE_TOKENS)
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys((*special, *pieces, *CHARACTERS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = "|".join(_escaped(piece) for piece in sorted(pieces, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{longest_first}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def _escaped(piece: str) -> str:
    return "".join("\\" + character if character in "()" else character for character in piece)
