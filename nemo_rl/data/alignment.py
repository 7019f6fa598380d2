"""Which tokens of two tokenizations stand for the same text: the spans that cross-tokenizer distillation compares.

Pure: pieces are the bytes that a token stands for (data/token_bytes.py), so tokens that split a character, leading
spaces and markers of any tokenizer need no rule of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of the student and of the teacher, start to end (exclusive), whose bytes are the same."""

    student_start: int
    student_end: int
    teacher_start: int
    teacher_end: int

    @property
    def is_one_to_one(self) -> bool:
        return self.student_end - self.student_start == 1 == self.teacher_end - self.teacher_start


def align(student: Sequence[bytes], teacher: Sequence[bytes]) -> tuple[Span, ...]:
    """The shortest spans that partition both sequences and hold the same bytes on both sides.

    A token without bytes belongs to the span of the token behind it, at the end to the last span; a side without any
    bytes is one span. Raises ValueError unless the bytes of all pieces are equal.

    Example: pieces `ab c d` and `a b cd` give (0, 1, 0, 2) and (1, 3, 2, 3).
    """
    if b"".join(student) != b"".join(teacher):
        raise ValueError("the two sides stand for different bytes")
    student_ends, teacher_ends = _token_counts_by_end(student), _token_counts_by_end(teacher)
    shared = sorted(student_ends.keys() & teacher_ends.keys())
    boundaries = [(0, 0), *((student_ends[end], teacher_ends[end]) for end in shared)]
    if len(boundaries) == 1:
        return (Span(0, len(student), 0, len(teacher)),) if student or teacher else ()
    boundaries[-1] = (len(student), len(teacher))
    return tuple(Span(s0, s1, t0, t1) for (s0, t0), (s1, t1) in pairwise(boundaries))


def _token_counts_by_end(pieces: Sequence[bytes]) -> dict[int, int]:
    """Number of tokens up to each byte at which a token with bytes ends."""
    ends: dict[int, int] = {}
    offset = 0
    for number, piece in enumerate(pieces, start=1):
        if piece:
            offset += len(piece)
            ends[offset] = number
    return ends


def valid_utf8_prefix(data: bytes) -> bytes:
    """The bytes before the first that are not UTF-8: a response may end, or go wrong, inside a character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data
