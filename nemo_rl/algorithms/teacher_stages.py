"""The teachers of a run, and the stages that add their log-probs or most likely tokens to a batch."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from nemo_rl import batch as keys
from nemo_rl.errors import PolicyError
from nemo_rl.experience.assembly import BatchRow
from nemo_rl.experience.cancellation import gather_or_cancel
from nemo_rl.interfaces import Teacher
from nemo_rl.loss_types import TopK
from nemo_rl.policy.micro_batches import trim
from nemo_rl.types import TrainingBatch

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class TeacherHandle:
    """A teacher, and whether it shares the policy's device."""

    teacher: Teacher
    shares_policy_device: bool  # then one model is on the device at a time
    sees: bool = False  # it is given the images of rollouts


@dataclass(frozen=True, slots=True)
class Teachers:
    by_key: Mapping[str, TeacherHandle]  # keys: section names, "teacher" or "teachers.math"
    key_by_task: Mapping[str, str]  # the key of each task's teacher

    async def query_each(
        self, rows: Sequence[BatchRow], query: Callable[[str, Teacher, torch.Tensor], Awaitable[AnswerT]]
    ) -> list[tuple[torch.Tensor, AnswerT]]:
        """Query every teacher that has rows, and return for each its rows as [N] int64 and its answer.

        Served teachers and those with their own devices are queried concurrently; those that share the policy's device
        are queried one after the other, each loaded only meanwhile.
        """
        row_indices: dict[str, list[int]] = {}
        for row_index, row in enumerate(rows):
            row_indices.setdefault(self.key_by_task[row.prompt.task_name], []).append(row_index)
        rows_by_teacher = {key: torch.tensor(own) for key, own in row_indices.items()}

        async def query_sequentially(some: Sequence[str]) -> list[tuple[torch.Tensor, AnswerT]]:
            return [(rows_by_teacher[key], await self._query(key, rows_by_teacher[key], query)) for key in some]

        sharing = [key for key in rows_by_teacher if self.by_key[key].shares_policy_device]
        lanes = [sharing, *([key] for key in rows_by_teacher if key not in sharing)]
        answers = await gather_or_cancel(query_sequentially(lane) for lane in lanes)
        return [answer for lane in answers for answer in lane]

    def rows_for(self, key: str, batch: TrainingBatch, rows: torch.Tensor) -> TrainingBatch:
        """Return a teacher's rows without the columns of the policy's engine: a teacher makes its own decisions.

        Images are those of the policy, with their features. Raises PolicyError for images, such as those of
        environments, and a teacher that reads text.
        """
        own = trim(batch.exclude(keys.COLUMNS)[rows])
        if keys.IMAGES not in own:
            return own
        if not (own[keys.IMAGE_ROWS] >= 0).any():
            return own.exclude(keys.IMAGE_ROWS, keys.IMAGES)
        if not self.by_key[key].sees:
            raise PolicyError(f"the rollouts have images; {key} reads text")
        return own

    async def _query(
        self, key: str, rows: torch.Tensor, query: Callable[[str, Teacher, torch.Tensor], Awaitable[AnswerT]]
    ) -> AnswerT:
        handle = self.by_key[key]
        if not handle.shares_policy_device:
            return await query(key, handle.teacher, rows)
        await handle.teacher.onload()
        answer = await query(key, handle.teacher, rows)
        await handle.teacher.offload()
        return answer


@dataclass(frozen=True, slots=True)
class TopKStage:
    """Adds the teacher's `k` most likely tokens; satisfies TeacherStage."""

    teachers: Teachers
    k: int
    vocab_size: int  # the policy's; ids above it pad the teacher's embedding and are dropped

    async def __call__(self, batch: TrainingBatch, rows: Sequence[BatchRow]) -> dict[str, float]:
        async def query(key: str, teacher: Teacher, own: torch.Tensor) -> TopK:
            return await teacher.topk_logprobs(self.teachers.rows_for(key, batch, own), self.k)

        shape = (*batch[keys.TOKEN_IDS].shape, self.k)
        ids, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for own, topk in await self.teachers.query_each(rows, query):
            length = topk.ids.shape[1]
            ids[own, :length], logprobs[own, :length] = topk.ids, topk.logprobs
        batch[keys.TEACHER_TOPK_IDS] = ids.masked_fill(ids >= self.vocab_size, -1)
        batch[keys.TEACHER_TOPK_LOGPROBS] = logprobs
        return {}


@dataclass(frozen=True, slots=True)
class LogprobsStage:
    """Adds the teacher's log-probs of the tokens themselves; satisfies TeacherStage."""

    teachers: Teachers

    async def __call__(self, batch: TrainingBatch, rows: Sequence[BatchRow]) -> dict[str, float]:
        async def query(key: str, teacher: Teacher, own: torch.Tensor) -> torch.Tensor:
            return await teacher.logprobs(self.teachers.rows_for(key, batch, own))

        result = torch.zeros(batch[keys.TOKEN_IDS].shape)
        for own, logprobs in await self.teachers.query_each(rows, query):
            result[own, : logprobs.shape[1]] = logprobs
        batch[keys.TEACHER_LOGPROBS] = result
        return {}
