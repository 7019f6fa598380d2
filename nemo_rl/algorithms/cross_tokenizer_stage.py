"""Teachers with another tokenizer than the student's.

Such a teacher reads the conversation under its own chat template: each response is the text of the tokens that the
student sampled, tokenized by the teacher, and everything around it is the teacher's rendering of the same messages. Its
most likely tokens become distributions over the student's (cross_tokenizer_targets.py).
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from nemo_rl import batch as keys
from nemo_rl.algorithms.cross_tokenizer_targets import (
    NO_TOKEN_ID,
    AlignedResponse,
    Targets,
    TeacherScores,
    TokenMap,
    identical_targets,
    prefix_targets,
)
from nemo_rl.algorithms.teacher_stages import Teachers
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.token_alignment import TURN_END, Vocabulary, encode_with_pieces, valid_utf8_prefix
from nemo_rl.experience.assembly import BatchRow
from nemo_rl.interfaces import Teacher
from nemo_rl.loss_types import TopK
from nemo_rl.types import Message, MessageLog, TokenizedMessage, TrainingBatch

Matching = Literal["prefix", "identical"]


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """A conversation as the teacher reads it."""

    token_ids: tuple[int, ...]
    responses: tuple[AlignedResponse, ...]


@dataclass(frozen=True, slots=True)
class ResponseTargets:
    """A teacher's targets for one response."""

    student_start: int  # position in the student's sequence
    targets: Targets
    num_teacher_tokens: int  # teacher tokens of the same response


class TeacherTargetBuilder:
    """Queries one teacher in its own tokens, and translates its distributions to the student's tokens."""

    def __init__(
        self,
        token_map: TokenMap,
        *,
        tokenizer: PreTrainedTokenizerBase,
        encoder: ChatEncoder,
        matching: Matching,
        max_length: int | None = None,
    ) -> None:
        """Take the teacher's `tokenizer`, `encoder`, and `max_length`, the most tokens that it accepts."""
        self.token_map = token_map
        self._rows = TeacherRenderer(token_map.student, token_map.teacher, tokenizer, encoder, max_length=max_length)
        self._compute_targets = prefix_targets if matching == "prefix" else identical_targets

    async def targets(self, teacher: Teacher, rows: Sequence[BatchRow], k: int) -> list[list[ResponseTargets]]:
        """Return each row's responses in their order, without those beyond the teacher's context."""
        teacher_rows = await asyncio.to_thread(self._render, rows)
        topk = await teacher.topk_logprobs(teacher_batch(teacher_rows), k)
        return await asyncio.to_thread(self._build_targets, teacher_rows, topk)

    def _render(self, rows: Sequence[BatchRow]) -> list[TeacherRow]:
        return [self._rows.row(row.message_log, row.prompt.tools) for row in rows]

    def _build_targets(self, rows: Sequence[TeacherRow], topk: TopK) -> list[list[ResponseTargets]]:
        ids, logprobs = topk.ids.numpy(), topk.logprobs.numpy()
        return [self._build_row_targets(row, ids[row_index], logprobs[row_index]) for row_index, row in enumerate(rows)]

    def _build_row_targets(self, row: TeacherRow, ids: np.ndarray, logprobs: np.ndarray) -> list[ResponseTargets]:
        row_targets = []
        for response in row.responses:
            own = slice(response.teacher_start, response.teacher_start + len(response.teacher_ids))
            targets = self._compute_targets(response, TeacherScores(ids[own], logprobs[own]), self.token_map)
            num_teacher_tokens = len(response.teacher_ids) - 1 + response.is_ended
            row_targets.append(ResponseTargets(response.student_start, targets, num_teacher_tokens))
        return row_targets


@dataclass(frozen=True, slots=True)
class CrossTokenizerStage:
    """Adds the keys that CrossTokenizerLoss reads; satisfies stages.TeacherStage."""

    teachers: Teachers
    target_builders: Mapping[str, TeacherTargetBuilder]  # keys: teacher keys
    k: int

    async def __call__(self, batch: TrainingBatch, rows: Sequence[BatchRow]) -> dict[str, float]:
        async def query(key: str, teacher: Teacher, own: torch.Tensor) -> list[list[ResponseTargets]]:
            return await self.target_builders[key].targets(
                teacher, [rows[row_index] for row_index in own.tolist()], self.k
            )

        shape = (*batch[keys.TOKEN_IDS].shape, self.k + 1)
        batch[keys.TEACHER_TOPK_IDS] = torch.full(shape, NO_TOKEN_ID)
        batch[keys.TEACHER_TOPK_LOGPROBS] = torch.zeros(shape)
        batch[keys.TEACHER_UNMATCHED] = torch.zeros(shape)
        batch[keys.SPAN_LENGTHS] = torch.zeros(shape[:2], dtype=torch.int64)
        written: list[ResponseTargets] = []
        for own, answers in await self.teachers.query_each(rows, query):
            for row, responses in zip(own.tolist(), answers, strict=True):
                for response in responses:
                    _write_response(batch, row, response)
                written += responses
        return alignment_metrics(written, num_tokens=int((batch[keys.TOKEN_MASK] > 0).sum()))


def teacher_batch(rows: Sequence[TeacherRow]) -> TrainingBatch:
    """Return the teacher's tokens, right-padded, with a mask on responses; an empty row has one padding token."""
    lengths = torch.tensor([max(len(row.token_ids), 1) for row in rows])
    width = int(lengths.max())
    token_ids, mask = torch.zeros((len(rows), width), dtype=torch.int64), torch.zeros(len(rows), width)
    for row_index, row in enumerate(rows):
        token_ids[row_index, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int64)
        for response in row.responses:
            mask[row_index, response.teacher_start : response.teacher_start + len(response.teacher_ids)] = 1.0
    tensors = {keys.TOKEN_IDS: token_ids, keys.TOKEN_MASK: mask, keys.LENGTHS: lengths}
    return TensorDict(tensors, batch_size=[len(rows)])


def alignment_metrics(responses: Iterable[ResponseTargets], *, num_tokens: int) -> dict[str, float]:
    """Return means over the `num_tokens` that the student sampled, as docs/metrics.md defines them."""
    responses, count = list(responses), max(num_tokens, 1)
    num_with_target = sum(int((one.targets.ids != NO_TOKEN_ID).any(-1).sum()) for one in responses)
    mass = sum(float(np.exp(one.targets.logprobs[one.targets.ids != NO_TOKEN_ID]).sum()) for one in responses)
    return {
        "cross_tokenizer/with_target": num_with_target / count,
        "cross_tokenizer/target_mass": mass / count,
        "cross_tokenizer/unmatched_mass": sum(float(one.targets.unmatched.sum()) for one in responses) / count,
        "cross_tokenizer/teacher_tokens_per_token": sum(one.num_teacher_tokens for one in responses) / count,
    }


def _write_response(batch: TrainingBatch, row: int, response: ResponseTargets) -> None:
    targets = response.targets
    size, width = targets.ids.shape
    at = slice(response.student_start, response.student_start + size)
    batch[keys.TEACHER_TOPK_IDS][row, at, :width] = torch.from_numpy(targets.ids)
    batch[keys.TEACHER_TOPK_LOGPROBS][row, at, :width] = torch.from_numpy(targets.logprobs)
    batch[keys.TEACHER_UNMATCHED][row, at, :width] = torch.from_numpy(targets.unmatched)
    batch[keys.SPAN_LENGTHS][row, at] = torch.from_numpy(targets.span_lengths)


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
    """Return the message with the text that the teacher reads in place of its parsed content."""
    text = b"".join(response.teacher_pieces).decode()
    return Message("assistant", text, message.message.tool_calls)
