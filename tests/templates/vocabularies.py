"""Small tokenizers of every way of writing tokens, trained on text of many scripts."""

import functools
import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.templates import template_text

CORPUS = (
    "the quick brown fox jumps over the lazy dog and the other foxes there",
    "Zürich, Köln und Łódź: déjà vu à la façade",
    "東京と京都、日本語のテキスト 你好世界",
    "Привет мир, здравствуйте привет",
    "👩‍👩‍👧 🎉🎉 naïve café ﬁne ½",
    "def f(x):\n    return x ** 2\n\n\tprint(f(12345))",
)
SPECIAL = ("<s>", "<|im_end|>", "<|im_start|>")
KINDS = ("bytes", "byte_bpe", "byte_bpe_large", "sentencepiece", "nfkc")


@functools.cache
def trained_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level `bytes`, `byte_bpe` and `byte_bpe_large`, `sentencepiece` with byte tokens, `nfkc`, which rewrites."""
    tokenizer = _sentencepiece() if kind == "sentencepiece" else _byte_level(kind)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template_text("chatml"),
        clean_up_tokenization_spaces=False,
        name_or_path=kind,
    )


def _byte_level(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "byte_bpe_large")
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "nfkc":
        tokenizer.normalizer = normalizers.NFKC()
    trainer = trainers.BpeTrainer(
        vocab_size={"bytes": 259, "byte_bpe": 330, "nfkc": 330, "byte_bpe_large": 460}[kind],
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, "<unk>", *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    backend = json.loads(tokenizer.to_str())
    # Byte tokens are in the vocabulary, but no text is ever read as one.
    backend["added_tokens"] = [token for token in backend["added_tokens"] if token["content"] not in byte_tokens]
    return Tokenizer.from_str(json.dumps(backend))
