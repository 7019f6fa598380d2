"""What tokens stand for, in every way that tokenizers write them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.token_alignment import SPECIAL, TURN_END, Vocabulary
from nemo_rl.quickstart.models import make_tokenizer
from tests.templates import byte_tokenizer
from tests.templates.vocabularies import trained_tokenizer

REVERSIBLE = ("bytes", "byte_bpe", "byte_bpe_large", "sentencepiece")


def vocabulary_of(tokenizer) -> Vocabulary:
    return Vocabulary.of(tokenizer, stop_token_ids=ChatEncoder(tokenizer).stop_token_ids)


def id_of(tokenizer, token: str) -> int:
    return tokenizer.get_vocab()[token]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
@pytest.mark.parametrize("kind", REVERSIBLE)
def test_the_bytes_of_a_texts_tokens_are_the_text(kind, text):
    tokenizer = trained_tokenizer(kind)
    vocabulary = vocabulary_of(tokenizer)
    pieces = vocabulary.response_pieces(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    assert b"".join(pieces) == text.encode()


def test_byte_level_tokens_are_bytes_and_added_ones_their_text():
    vocabulary = vocabulary_of(byte_tokenizer("qwen3"))
    assert {bytes([byte]) for byte in range(256)} <= set(vocabulary.ids)
    assert vocabulary.ids[b"<think>"] == id_of(byte_tokenizer("qwen3"), "<think>")


def test_sentencepiece_tokens_have_spaces_and_single_bytes():
    tokenizer = trained_tokenizer("sentencepiece")
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.strips_leading_space
    assert vocabulary.ids[b" the"] == id_of(tokenizer, "▁the")
    assert vocabulary.pieces[id_of(tokenizer, "<0xE6>")] == b"\xe6"


def test_special_tokens_equal_those_of_the_same_name_and_turn_ends_each_other():
    chatml, llama = byte_tokenizer("chatml"), byte_tokenizer("llama3")
    ours, theirs = vocabulary_of(chatml), vocabulary_of(llama)
    assert ours.pieces[id_of(chatml, "<|im_end|>")] == TURN_END == theirs.pieces[id_of(llama, "<|eot_id|>")]
    assert ours.pieces[id_of(chatml, "<|im_start|>")] == SPECIAL + b"<|im_start|>"
    assert ours.beginning(SPECIAL + b"<|start_header_id|>") is None


def test_a_text_begins_with_the_longest_token_that_fits():
    tokenizer = make_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.beginning(b"users") == id_of(tokenizer, "user")
    assert vocabulary.beginning(b"used") == id_of(tokenizer, "u")
    assert vocabulary.beginning("é".encode()) is None
    assert vocabulary.beginning(b"") is None


def test_sampled_special_tokens_add_no_text_but_the_end_of_the_turn_stays():
    tokenizer = make_tokenizer()
    start, end, a = (id_of(tokenizer, token) for token in ("<|im_start|>", "<|im_end|>", "a"))
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.response_pieces([a, start, a, end]) == [b"a", b"", b"a", TURN_END]
    assert vocabulary.response_pieces([end, a, 10_000]) == [b"", b"a", b""]


def test_a_response_of_sentencepiece_tokens_begins_without_its_space():
    tokenizer = trained_tokenizer("sentencepiece")
    the = id_of(tokenizer, "▁the")
    assert vocabulary_of(tokenizer).response_pieces([the, the]) == [b"the", b" the"]
