"""Spans of two tokenizations: hand-made ones, and Unicode text through tokenizers of every kind."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.data.token_alignment import Span, Vocabulary, align, encode_with_pieces, valid_utf8_prefix
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
            assert all(span.is_one_to_one for span in spans)


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
