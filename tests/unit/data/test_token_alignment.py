"""Tokens as bytes, and spans of two tokenizations."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.token_alignment import (
    SPECIAL,
    TURN_END,
    Span,
    Vocabulary,
    align,
    encode_with_pieces,
    valid_utf8_prefix,
)
from nemo_rl.quickstart.models import make_tokenizer
from tests.templates import byte_tokenizer
from tests.templates.vocabularies import KINDS, trained_tokenizer

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30) | st.sampled_from(
    [
        "",
        " ",
        "  the  quick ",
        "\n\n\tthe",
        "東京",
        "👩‍👩‍👧",
        "ﬁne ½ café",
        "<|im_end|>",
        "<0x41>",
        "▁the▁fox",
        "e\u0301",
    ]
)


@st.composite
def cut_bytes(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """The same bytes cut twice at any places, tokens without bytes among them."""
    data = draw(st.binary(max_size=24) | texts.map(str.encode))
    return draw(pieces_of(data)), draw(pieces_of(data))


@st.composite
def pieces_of(draw: st.DrawFn, data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data) + 3)))
    return [data[a:b] for a, b in pairwise([0, *cuts, len(data)])] if data or cuts else []


def test_spans_end_where_both_sides_end_a_token():
    assert align([b"ab", b"c", b"d"], [b"a", b"b", b"cd"]) == (Span(0, 1, 0, 2), Span(1, 3, 2, 3))
    assert align([b" the", b" fox"], [b" the", b" ", b"fox"]) == (Span(0, 1, 0, 1), Span(1, 2, 1, 3))


def test_tokens_that_split_a_character_are_one_span():
    student, teacher = ["東".encode()[:1], "東".encode()[1:]], ["東".encode()]
    assert align(student, teacher) == (Span(0, 2, 0, 1),)


def test_tokens_without_bytes_belong_to_what_follows():
    assert align([b"", b"a", b"", b"b"], [b"a", b"b", b""]) == (Span(0, 2, 0, 1), Span(2, 4, 1, 3))
    assert align([b"", b""], []) == (Span(0, 2, 0, 0),)
    assert align([], []) == ()


def test_different_bytes_are_refused():
    with pytest.raises(ValueError, match="different bytes"):
        align([b"a"], [b"b"])


@settings(max_examples=200, deadline=None)
@given(cut_bytes())
def test_spans_partition_both_sides_hold_the_same_bytes_and_are_minimal(sides):
    check_spans(*sides)


@settings(max_examples=60, deadline=None)
@given(texts)
@pytest.mark.parametrize("student_kind", KINDS)
def test_unicode_text_is_aligned_between_any_two_tokenizers(student_kind, text):
    student = pieces_by(student_kind, text)
    for teacher_kind in KINDS:
        teacher = pieces_by(teacher_kind, text)
        spans = check_spans(student, teacher)
        if student_kind == teacher_kind and all(student):
            assert all(s.student_end - s.student_start == 1 == s.teacher_end - s.teacher_start for s in spans)


def test_text_before_the_first_byte_that_is_no_utf_8_is_kept():
    assert valid_utf8_prefix("aé".encode() + b"\xe6\x9d") == "aé".encode()
    assert valid_utf8_prefix("aé".encode()) == "aé".encode()


def pieces_by(kind: str, text: str) -> list[bytes]:
    tokenizer = trained_tokenizer(kind)
    token_ids, pieces = encode_with_pieces(tokenizer, Vocabulary.of(tokenizer, stop_token_ids=[1]), text)
    assert list(token_ids) == tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert b"".join(pieces) == text.encode()
    return pieces


def check_spans(student: list[bytes], teacher: list[bytes]) -> tuple[Span, ...]:
    spans = align(student, teacher)
    assert [i for s in spans for i in range(s.student_start, s.student_end)] == list(range(len(student)))
    assert [i for s in spans for i in range(s.teacher_start, s.teacher_end)] == list(range(len(teacher)))
    for span in spans:
        ours, theirs = student[span.student_start : span.student_end], teacher[span.teacher_start : span.teacher_end]
        assert b"".join(ours) == b"".join(theirs)
        whole = len(b"".join(ours))
        ends = {len(b"".join(ours[:n])) for n in range(len(ours))} & {
            len(b"".join(theirs[:n])) for n in range(len(theirs))
        }
        assert ends <= {0, whole}  # no shorter span would do
    return spans


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
