"""On-policy distillation from a teacher with another tokenizer: from the student's rollouts to what its loss compares.

The teacher reads the conversation under its own chat template (cross_tokenizer_rows.py) and is asked for its most
likely tokens; they become distributions over the student's (cross_tokenizer_targets.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from nemo_rl import batch as keys
from nemo_rl.algorithms.cross_tokenizer_rows import TeacherRow, TeacherRows
from nemo_rl.algorithms.cross_tokenizer_targets import (
    NONE,
    Targets,
    TeacherScores,
    TokenMap,
    identical_targets,
    prefix_targets,
)
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.experience.assembly import kept_trajectories
from nemo_rl.interfaces import Teacher
from nemo_rl.types import MessageLog, TrainingBatch, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class History:
    """A row of the training batch as messages, with the tools that its prompt offers."""

    message_log: MessageLog
    task_name: str
    tools: tuple[Mapping[str, Any], ...] = ()


def histories(groups: Sequence[TrajectoryGroup], *, min_group_size: int) -> list[History]:
    """The rows of the batch that `assemble_batch` makes of the same groups, in its order."""
    return [
        History(log, trajectory.prompt.task_name, trajectory.prompt.tools)
        for _, trajectory in kept_trajectories(groups, min_group_size)
        for log in trajectory.chains
    ]


class CrossTokenizerTeacher:
    """A teacher that is asked in its own tokens and answers in the student's."""

    def __init__(
        self,
        teacher: Teacher,
        *,
        tokenizer: PreTrainedTokenizerBase,
        encoder: ChatEncoder,
        token_map: TokenMap,
        matching: Literal["prefix", "identical"],
        max_length: int | None = None,
    ) -> None:
        """`tokenizer` and `encoder` are the teacher's, `max_length` the tokens that it takes."""
        self._teacher = teacher
        self._rows = TeacherRows(token_map.student, token_map.teacher, tokenizer, encoder, max_length=max_length)
        self._map = token_map
        self._targets_of = prefix_targets if matching == "prefix" else identical_targets

    async def add_targets(
        self, batch: TrainingBatch, batch_histories: Sequence[History], k: int, rows: Sequence[int] | None = None
    ) -> dict[str, float]:
        """Add TEACHER_TOPK_IDS, TEACHER_TOPK_LOGPROBS, TEACHER_UNMATCHED and SPAN_LENGTHS; metrics of the alignment.

        `rows` are those of the batch that this teacher answers for; None: all. The others keep what they have.
        """
        rows = range(len(batch)) if rows is None else rows
        teacher_rows = [self._rows.row(batch_histories[row].message_log, batch_histories[row].tools) for row in rows]
        ids, logprobs = await self._teacher.topk_logprobs(_teacher_batch(teacher_rows), k)
        _add_empty_targets(batch, k)
        tally = _Tally()
        for place, (row, teacher_row) in enumerate(zip(rows, teacher_rows, strict=True)):
            for response in teacher_row.responses:
                own = slice(response.teacher_start, response.teacher_start + len(response.teacher_ids))
                scores = TeacherScores(ids[place, own].numpy(), logprobs[place, own].numpy())
                targets = self._targets_of(response, scores, self._map)
                _place(batch, row, response.student_start, targets)
                tally.add(targets, num_teacher_tokens=len(response.teacher_ids) - 1 + response.is_ended)
        return tally.metrics


def _teacher_batch(rows: Sequence[TeacherRow]) -> TrainingBatch:
    """What a Teacher reads: its tokens, right-padded, with a mask on the responses'."""
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    width = max(int(lengths.max()), 1)
    token_ids, mask = torch.zeros((len(rows), width), dtype=torch.int64), torch.zeros(len(rows), width)
    for place, row in enumerate(rows):
        token_ids[place, : len(row.token_ids)] = torch.tensor(row.token_ids, dtype=torch.int64)
        for at in chain.from_iterable(
            range(r.teacher_start, r.teacher_start + len(r.teacher_ids)) for r in row.responses
        ):
            mask[place, at] = 1.0
    tensors = {keys.TOKEN_IDS: token_ids, keys.TOKEN_MASK: mask, keys.LENGTHS: lengths}
    return TensorDict(tensors, batch_size=[len(rows)])


def _add_empty_targets(batch: TrainingBatch, k: int) -> None:
    """Without effect where another teacher has answered for other rows."""
    if keys.TEACHER_TOPK_IDS in batch:
        return
    shape = batch[keys.TOKEN_IDS].shape
    batch[keys.TEACHER_TOPK_IDS] = torch.full((*shape, k + 1), NONE)
    batch[keys.TEACHER_TOPK_LOGPROBS] = torch.zeros(*shape, k + 1)
    batch[keys.TEACHER_UNMATCHED] = torch.zeros(*shape, k + 1)
    batch[keys.SPAN_LENGTHS] = torch.zeros(shape, dtype=torch.int64)


def _place(batch: TrainingBatch, row: int, start: int, targets: Targets) -> None:
    size, width = targets.ids.shape
    at = slice(start, start + size)
    batch[keys.TEACHER_TOPK_IDS][row, at, :width] = torch.from_numpy(targets.ids)
    batch[keys.TEACHER_TOPK_LOGPROBS][row, at, :width] = torch.from_numpy(targets.logprobs)
    batch[keys.TEACHER_UNMATCHED][row, at, :width] = torch.from_numpy(targets.unmatched)
    batch[keys.SPAN_LENGTHS][row, at] = torch.from_numpy(targets.span_lengths)


@dataclass(slots=True)
class _Tally:
    """Sums over the sampled tokens of a step."""

    num_tokens: int = 0
    num_with_target: int = 0
    num_teacher_tokens: int = 0
    mass: float = 0.0
    unmatched: float = 0.0

    def add(self, targets: Targets, *, num_teacher_tokens: int) -> None:
        is_token = targets.ids != NONE
        self.num_tokens += len(targets.ids)
        self.num_with_target += int(is_token.any(-1).sum())
        self.num_teacher_tokens += num_teacher_tokens
        self.mass += float(np.exp(targets.logprobs, where=is_token, out=np.zeros_like(targets.logprobs)).sum())
        self.unmatched += float(targets.unmatched.sum())

    @property
    def metrics(self) -> dict[str, float]:
        count = max(self.num_tokens, 1)
        return {
            "cross_tokenizer/with_target": self.num_with_target / count,
            "cross_tokenizer/target_mass": self.mass / count,
            "cross_tokenizer/unmatched_mass": self.unmatched / count,
            "cross_tokenizer/teacher_tokens_per_token": self.num_teacher_tokens / count,
        }
