"""Vocabularies, responses and teachers of a few tokens, for tests of cross-tokenizer distillation."""

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_rl.algorithms.cross_tokenizer_targets import AlignedResponse, Targets, TeacherScores
from nemo_rl.data.token_alignment import SPECIAL, TURN_END, Vocabulary


def vocabulary(*tokens: str, strips_leading_space: bool = False) -> Vocabulary:
    """Token 0 ends a turn, the others are the given texts; those in angle brackets are special."""
    texts = tuple(token.encode() for token in ("<end>", *tokens))
    pieces = tuple(SPECIAL + text if text.startswith(b"<") else text for text in texts)
    return Vocabulary((TURN_END, *pieces[1:]), texts, 0, strips_leading_space)


def response(
    student: Vocabulary, sampled: Sequence[str], teacher: Vocabulary, read: Sequence[str], *, is_ended: bool = True
) -> AlignedResponse:
    """The student's tokens and the teacher's, by their text; the end of the turn is added."""
    student_ids = [student.texts.index(token.encode()) for token in sampled] + [0] * is_ended
    pieces = student.response_pieces(student_ids)
    if is_ended:
        pieces[-1] = b""
    read_pieces = [token.encode() for token in read]
    if teacher.strips_leading_space and read_pieces:
        read_pieces[0] = read_pieces[0].removeprefix(b" ")
    return AlignedResponse(
        student_start=0,
        student_ids=tuple(student_ids),
        student_pieces=tuple(pieces),
        num_aligned=len(sampled),
        is_ended=is_ended,
        teacher_start=0,
        teacher_ids=(*(teacher.texts.index(token.encode()) for token in read), 0),
        teacher_pieces=(*read_pieces, b""),
    )


def scores(teacher: Vocabulary, *distributions: Mapping[str, float]) -> TeacherScores:
    """The teacher's probabilities before each of its tokens; all distributions of the same size."""
    ids = [[0 if token == "<end>" else teacher.texts.index(token.encode()) for token in one] for one in distributions]
    return TeacherScores(np.array(ids), np.log(np.array([list(one.values()) for one in distributions], np.float32)))


def by_token(targets: Targets, student: Vocabulary) -> list[dict[str, float]]:
    """The rows of targets as probabilities by the token's text."""
    return [
        {student.texts[i].decode(): float(np.exp(p)) for i, p in zip(ids, logprobs, strict=True) if i >= 0}
        for ids, logprobs in zip(targets.ids, targets.logprobs, strict=True)
    ]
