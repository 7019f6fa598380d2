"""The teacher's distributions over the student's tokens: hand-computed, and what holds for any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.algorithms.cross_tokenizer_targets import (
    AlignedResponse,
    TeacherScores,
    TokenMap,
    identical_targets,
    merge_duplicate_ids,
    prefix_targets,
)
from nemo_rl.data.token_alignment import Vocabulary
from tests.unit.algorithms.cross_tokenizer import by_token, response, scores, vocabulary

LETTERS = vocabulary("a", "b", "c")
LETTERS_AND_BC = vocabulary("a", "b", "c", "bc")
PAIRS = vocabulary("a", "b", "c", "ab", "bc", "ca")


def test_identical_tokenizers_keep_every_distribution():
    given_scores = TeacherScores(np.array([[2, 0, 1], [1, 3, 2]]), np.log(np.array([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]])))
    same = response(LETTERS, ["b"], LETTERS, ["b"])
    for method in (prefix_targets, identical_targets):
        targets = method(same, given_scores, TokenMap(LETTERS, LETTERS))
        np.testing.assert_array_equal(targets.ids[:, :3], given_scores.ids)
        np.testing.assert_allclose(targets.logprobs[:, :3], given_scores.logprobs, rtol=1e-6)
        assert (targets.ids[:, 3:] == -1).all()
        assert not targets.unmatched.any()


def test_a_longer_teacher_token_goes_to_the_token_that_the_student_begins_it_with():
    """Before `a`: a takes ab and a. Before `b`: of .6 for ab and .1 for a, ab goes on with b."""
    read = response(LETTERS, ["a", "b"], PAIRS, ["ab"])
    teacher = scores(PAIRS, {"ab": 0.6, "bc": 0.2, "a": 0.1}, {"<end>": 0.9, "c": 0.06, "ca": 0.04})
    rows = by_token(prefix_targets(read, teacher, TokenMap(LETTERS, PAIRS)), LETTERS)
    assert rows[0] == pytest.approx({"a": 0.7, "b": 0.2})
    assert rows[1] == pytest.approx({"b": 6 / 7})
    assert rows[2] == pytest.approx({"<end>": 0.9, "c": 0.1})


def test_shorter_teacher_tokens_give_the_students_by_the_chain_rule():
    """ab is .7 * .8; the rest of the .7 for a stays with the student's a."""
    read = response(PAIRS, ["ab"], LETTERS, ["a", "b"])
    teacher = scores(LETTERS, {"a": 0.7, "c": 0.3}, {"b": 0.8, "a": 0.2}, {"<end>": 0.9, "a": 0.1})
    rows = by_token(prefix_targets(read, teacher, TokenMap(PAIRS, LETTERS)), PAIRS)
    assert rows[0] == pytest.approx({"ab": 0.56, "a": 0.14, "c": 0.3})
    assert rows[1] == pytest.approx({"<end>": 0.9, "a": 0.1})


def test_spans_of_several_tokens_on_both_sides_follow_the_bytes():
    """Student a|bc, teacher ab|c. After a all of ab goes on with b; .3 of it is bc, since c follows ab with .3."""
    read = response(LETTERS_AND_BC, ["a", "bc"], PAIRS, ["ab", "c"])
    teacher = scores(PAIRS, {"ab": 0.5, "c": 0.5}, {"c": 0.3, "ca": 0.1}, {"<end>": 1.0, "a": 1e-9})
    rows = by_token(prefix_targets(read, teacher, TokenMap(LETTERS_AND_BC, PAIRS)), LETTERS_AND_BC)
    assert rows[0] == pytest.approx({"a": 0.5, "c": 0.5})
    assert rows[1] == pytest.approx({"b": 0.7, "bc": 0.3})


def test_a_chain_that_ends_inside_a_teacher_token_takes_all_that_begin_so():
    """Student ab|c, teacher a|bc: ab is .5 * (.6 + .2), since bc and b both go on with b."""
    student = vocabulary("a", "b", "c", "ab")
    read = response(student, ["ab", "c"], PAIRS, ["a", "bc"])
    teacher = scores(PAIRS, {"a": 0.5, "c": 0.5}, {"bc": 0.6, "b": 0.2}, {"<end>": 1.0, "a": 1e-9})
    rows = by_token(prefix_targets(read, teacher, TokenMap(student, PAIRS)), student)
    assert rows[0] == pytest.approx({"ab": 0.4, "a": 0.1, "c": 0.5})
    assert rows[1] == pytest.approx({"c": 0.75})


def test_before_a_token_that_is_no_text_stands_what_the_teacher_would_have_said():
    student = vocabulary("a", "b", "<junk>")
    read = response(student, ["a", "<junk>", "b"], LETTERS, ["a", "b"])
    teacher = scores(LETTERS, {"a": 0.9, "b": 0.1}, {"b": 0.8, "a": 0.2}, {"<end>": 0.7, "b": 0.3})
    rows = by_token(prefix_targets(read, teacher, TokenMap(student, LETTERS)), student)
    assert rows[1] == rows[2] == pytest.approx({"b": 0.8, "a": 0.2})


def test_tokens_behind_the_text_have_no_target_but_the_first():
    cut = AlignedResponse(0, (1, 2, 3), (b"a", b"\xe6", b"\xe6"), 1, False, 0, (1, 0), (b"a", b""))
    teacher = scores(LETTERS, {"a": 0.9, "b": 0.1}, {"<end>": 0.7, "b": 0.3})
    rows = by_token(prefix_targets(cut, teacher, TokenMap(LETTERS, LETTERS)), LETTERS)
    assert rows == [pytest.approx({"a": 0.9, "b": 0.1}), pytest.approx({"<end>": 0.7, "b": 0.3}), {}]


def test_spaces_that_begin_a_text_are_added_and_taken_away():
    """A SentencePiece student writes ` a` where a byte-level teacher writes `a`, and the other way round."""
    sentencepiece, plain = vocabulary(" a", "a", " ", strips_leading_space=True), vocabulary("a", " a", " ")
    teacher = scores(plain, {"a": 0.8, " a": 0.2}, {" a": 0.6, "a": 0.4}, {"<end>": 0.9, "a": 0.1})
    read = response(sentencepiece, [" a", " a"], plain, ["a", " a"])
    rows = by_token(prefix_targets(read, teacher, TokenMap(sentencepiece, plain)), sentencepiece)
    assert rows[0] == pytest.approx({" a": 0.8, " ": 0.2})
    assert rows[1] == pytest.approx({" a": 0.6, "a": 0.4})
    teacher = scores(sentencepiece, {" a": 0.8, "a": 0.2}, {" a": 0.6, "a": 0.4}, {"<end>": 0.9, "a": 0.1})
    read = response(plain, ["a", " a"], sentencepiece, [" a", " a"])
    rows = by_token(prefix_targets(read, teacher, TokenMap(plain, sentencepiece)), plain)
    assert rows[0] == pytest.approx({"a": 1.0})
    assert rows[1] == pytest.approx({" a": 0.6, "a": 0.4})


def test_gold_compares_whole_spans_and_sorts_what_has_no_counterpart():
    """Of the teacher's span a, b: a is matched, times .8 for the b that follows; ca and bc are unmatched."""
    student = vocabulary("a", "b", "c", "ab")
    teacher_vocabulary = vocabulary("a", "b", "c", "bc", "ca")
    read = response(student, ["ab"], teacher_vocabulary, ["a", "b"])
    teacher = scores(
        teacher_vocabulary,
        {"a": 0.5, "ca": 0.1, "bc": 0.2},
        {"b": 0.8, "a": 0.1, "c": 0.1},
        {"<end>": 0.9, "a": 0.1, "b": 1e-9},
    )
    targets = identical_targets(read, teacher, TokenMap(student, teacher_vocabulary))
    assert by_token(targets, student)[0] == pytest.approx({"a": 0.4})
    np.testing.assert_allclose(targets.unmatched, [[0.16, 0.08, 0], [0, 0, 0]], atol=1e-6)
    assert targets.span_lengths.tolist() == [1, 1]
    assert TokenMap(student, teacher_vocabulary).student_unmatched.tolist() == [False, False, False, False, True]


def test_gold_leaves_the_later_tokens_of_a_students_span_without_a_target():
    read = response(LETTERS, ["a", "b"], PAIRS, ["ab"])
    teacher = scores(PAIRS, {"ab": 0.6, "a": 0.4}, {"<end>": 0.9, "c": 0.1})
    targets = identical_targets(read, teacher, TokenMap(LETTERS, PAIRS))
    assert targets.span_lengths.tolist() == [2, 0, 1]
    assert by_token(targets, LETTERS)[:2] == [pytest.approx({"a": 0.4}), {}]


def test_a_token_outside_of_the_likeliest_counts_as_the_last_of_them():
    read = response(PAIRS, ["ab"], LETTERS, ["a", "b"])
    teacher = scores(LETTERS, {"a": 0.7, "c": 0.3}, {"c": 0.6, "a": 0.2}, {"<end>": 0.9, "a": 0.1})
    rows = by_token(prefix_targets(read, teacher, TokenMap(PAIRS, LETTERS)), PAIRS)
    assert rows[0]["ab"] == pytest.approx(0.7 * 0.2)


def test_equal_tokens_of_a_row_are_added_up():
    ids, probs = (
        np.array([[3, -1, 3], [-1, -1, -1], [2, 3, 4]]),
        np.array([[0.1, 0.5, 0.2], [1, 1, 1], [0.1, 0.2, 0.3]]),
    )
    merge_duplicate_ids(ids, probs)
    assert ids.tolist() == [[3, -1, -1], [-1, -1, -1], [2, 3, 4]]
    np.testing.assert_allclose(probs, [[0.3, 0, 0], [0, 0, 0], [0.1, 0.2, 0.3]])


TOKENS = ("a", "b", "c", "ab", "bc", "abc", "ca", "bca", "cab")


@st.composite
def any_case(draw: st.DrawFn) -> tuple[AlignedResponse, TeacherScores, TokenMap]:
    """A text of a, b, c in two tokenizations, and a teacher that tells its whole distribution."""
    student, teacher = (
        vocabulary("a", "b", "c", *draw(st.lists(st.sampled_from(TOKENS[3:]), unique=True))) for _ in range(2)
    )
    text = draw(st.text("abc", max_size=8))
    read = response(student, draw(cut(text, student)), teacher, draw(cut(text, teacher)), is_ended=draw(st.booleans()))
    size = len(teacher.pieces)
    weights = np.array(
        draw(st.lists(st.lists(st.floats(0.01, 1), min_size=size, max_size=size), min_size=9, max_size=9))
    )[: len(read.teacher_ids)]
    probs = weights / weights.sum(-1, keepdims=True)
    return read, TeacherScores(np.tile(np.arange(size), (len(probs), 1)), np.log(probs)), TokenMap(student, teacher)


@st.composite
def cut(draw: st.DrawFn, text: str, vocabulary_of: Vocabulary) -> list[str]:
    tokens = []
    while text:
        fitting = [token for token in TOKENS if text.startswith(token) and token.encode() in vocabulary_of.ids]
        tokens.append(draw(st.sampled_from(fitting)))
        text = text[len(tokens[-1]) :]
    return tokens


@settings(max_examples=300, deadline=None)
@given(any_case())
def test_targets_are_distributions_and_know_everything_before_the_first_token(case):
    targets = prefix_targets(*case)
    totals = np.where(targets.ids >= 0, np.exp(targets.logprobs.astype(float)), 0).sum(-1)
    assert (totals <= 1 + 1e-5).all()
    if len(totals):
        assert totals[0] == pytest.approx(1, abs=1e-5)
    for row in targets.ids:
        assert len(set(row[row >= 0])) == (row >= 0).sum()


@settings(max_examples=300, deadline=None)
@given(any_case())
def test_sampled_letters_have_at_least_the_probability_of_the_teachers_own_tokens(case):
    """Along letters the conditionals multiply to it, or to more where other tokens of the teacher spell the same."""
    read, teacher, token_map = case
    letters = vocabulary("a", "b", "c")
    text = b"".join(read.teacher_pieces).decode()
    spelt = AlignedResponse(
        0,
        (*(letters.ids[c.encode()] for c in text), 0),
        (*(c.encode() for c in text), b""),
        len(text),
        True,
        0,
        read.teacher_ids,
        read.teacher_pieces,
    )
    targets = prefix_targets(spelt, teacher, TokenMap(letters, token_map.teacher))
    ours = theirs = 0.0
    for span in spelt.spans:
        for row in range(span.student_start, span.student_end):
            ours += targets.logprobs[row][targets.ids[row] == spelt.student_ids[row]].sum()
        theirs += sum(teacher.logprobs[p][read.teacher_ids[p]] for p in range(span.teacher_start, span.teacher_end))
        assert ours >= theirs - 1e-3


def test_what_the_student_samples_does_not_change_what_stood_before_it():
    """The teacher reads ab as one token and a|c as two; b behind a is .6 of .8 in both, and c is .9 of a's .2."""
    first = {"ab": 0.6, "a": 0.2, "b": 0.2}
    read = response(LETTERS, ["a", "b"], PAIRS, ["ab"])
    teacher = scores(PAIRS, first, {"<end>": 0.9, "c": 0.06, "ca": 0.04})
    with_b = by_token(prefix_targets(read, teacher, TokenMap(LETTERS, PAIRS)), LETTERS)
    read = response(LETTERS, ["a", "c"], PAIRS, ["a", "c"])
    teacher = scores(PAIRS, first, {"c": 0.9, "<end>": 0.05, "ca": 0.01}, {"<end>": 0.9, "c": 0.06, "ca": 0.04})
    with_c = by_token(prefix_targets(read, teacher, TokenMap(LETTERS, PAIRS)), LETTERS)
    assert with_b[0] == with_c[0]
    assert with_b[1] == pytest.approx({"b": 0.75})
    assert with_c[1] == pytest.approx({"b": 0.75, "c": 0.91 * 0.25, "<end>": 0.05 * 0.25})


def test_a_turn_that_ends_where_a_longer_token_would_go_on_shares_with_it():
    read = response(LETTERS, ["a"], PAIRS, ["a"])
    teacher = scores(PAIRS, {"ab": 0.6, "a": 0.2, "b": 0.2}, {"<end>": 0.9, "c": 0.06, "b": 0.04})
    rows = by_token(prefix_targets(read, teacher, TokenMap(LETTERS, PAIRS)), LETTERS)
    assert rows[1] == pytest.approx({"b": 0.75 + 0.01, "<end>": 0.225, "c": 0.015})
