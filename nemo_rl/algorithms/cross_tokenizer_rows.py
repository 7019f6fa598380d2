"""Rows for a teacher with another tokenizer: the student's conversations under the teacher's chat template.

Each response is the text of the tokens that the student sampled, tokenized by the teacher; everything around it is the
teacher's rendering of the same messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.token_alignment import TURN_END, Span, Vocabulary, align, encode_with_pieces, valid_utf8_prefix
from nemo_rl.types import Message, MessageLog, TokenizedMessage


@dataclass(frozen=True, slots=True)
class AlignedResponse:
    """One sampled message in both tokenizations.

    The teacher's tokens are those of the text and one that ends the turn, also where the student's response has no end:
    the distribution before it is the one that follows the text.
    """

    student_start: int  # in the student's sequence
    student_ids: tuple[int, ...]
    student_pieces: tuple[bytes, ...]  # a token that adds no text is empty
    num_aligned: int  # of the student's tokens: later ones follow bytes that are not valid text
    is_ended: bool  # the student's last token ends the turn
    teacher_start: int  # in the teacher's sequence
    teacher_ids: tuple[int, ...]
    teacher_pieces: tuple[bytes, ...]  # that of the turn's end is empty

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the text's tokens, without the end of the turn."""
        return align(self.student_pieces[: self.num_aligned], self.teacher_pieces[:-1])


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """A conversation as the teacher reads it."""

    token_ids: tuple[int, ...]
    responses: tuple[AlignedResponse, ...]


class TeacherRenderer:
    """Renders the student's histories for the teacher."""

    def __init__(
        self,
        student: Vocabulary,
        teacher: Vocabulary,
        teacher_tokenizer: PreTrainedTokenizerBase,
        teacher_encoder: ChatEncoder,
        *,
        max_length: int | None = None,
    ) -> None:
        """Leave out responses that end after the teacher's `max_length` tokens."""
        self._student = student
        self._teacher = teacher
        self._tokenizer = teacher_tokenizer
        self._encoder = teacher_encoder
        self._max_length = max_length

    def row(self, message_log: MessageLog, tools: Sequence[Mapping[str, Any]] = ()) -> TeacherRow:
        """Return a history for the teacher; raises ConfigError when its template refuses a role."""
        log: MessageLog = ()
        context: list[Message] = []
        responses: list[AlignedResponse] = []
        student_start = teacher_start = 0
        for message in message_log:
            if not message.is_generated:
                context.append(message.message)
            else:
                encoder = self._encoder
                segment = encoder.encode_turn(log, context, tools) if log else encoder.encode_prompt(context, tools)
                teacher_start += len(flat_token_ids(segment))
                response = self._response(message, student_start, teacher_start)
                teacher_start += len(response.teacher_ids)
                if self._max_length is not None and teacher_start > self._max_length:
                    break
                log = (*log, *segment, TokenizedMessage(_with_teacher_text(message, response), response.teacher_ids))
                context = []
                responses.append(response)
            student_start += len(message.token_ids)
        return TeacherRow(flat_token_ids(log), tuple(responses))

    def _response(self, message: TokenizedMessage, student_start: int, teacher_start: int) -> AlignedResponse:
        pieces = self._student.response_pieces(message.token_ids)
        is_ended = bool(pieces) and pieces[-1] == TURN_END
        if is_ended:
            pieces[-1] = b""
        num_aligned, text = _decode_valid_prefix(pieces[:-1] if is_ended else pieces)
        teacher_ids, teacher_pieces = encode_with_pieces(self._tokenizer, self._teacher, text)
        return AlignedResponse(
            student_start=student_start,
            student_ids=message.token_ids,
            student_pieces=tuple(pieces),
            num_aligned=num_aligned,
            is_ended=is_ended and num_aligned == len(pieces) - 1,
            teacher_start=teacher_start,
            teacher_ids=(*teacher_ids, self._teacher.turn_end),
            teacher_pieces=(*teacher_pieces, b""),
        )


def _decode_valid_prefix(pieces: Sequence[bytes]) -> tuple[int, str]:
    """Return the number of leading tokens that form whole characters, and their text."""
    data = b"".join(pieces)
    valid = valid_utf8_prefix(data)
    ends = [0, *accumulate(map(len, pieces))]
    for number in range(len(pieces), 0, -1):
        if ends[number] <= len(valid) and valid_utf8_prefix(data[: ends[number]]) == data[: ends[number]]:
            return number, data[: ends[number]].decode()
    return 0, ""


def _with_teacher_text(message: TokenizedMessage, response: AlignedResponse) -> Message:
    """Return the message with the text that the teacher reads instead of what was parsed from it."""
    text = b"".join(response.teacher_pieces).decode()
    return Message("assistant", text, message.message.tool_calls)
