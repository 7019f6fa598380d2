"""On-policy distillation: teachers score the student's samples, and the loss compares the two."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.run import Placement
from nemo_rl.algorithms.stages import batch_metrics
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.experience.assembly import BatchRow, assemble_batch
from nemo_rl.experience.supervision import gather_or_cancel
from nemo_rl.interfaces import CollectedGroups, LossFn, Teacher, TopK
from nemo_rl.observability.timer import StepTimer
from nemo_rl.policy.micro_batches import trim
from nemo_rl.types import TrainingBatch

AnswerT = TypeVar("AnswerT")


class TeacherStage(Protocol):
    """Adds to a batch, in place, what its loss or advantages read of the teachers."""

    async def __call__(self, batch: TrainingBatch, rows: Sequence[BatchRow]) -> dict[str, float]:
        """Metrics of the step; one of `rows` a row of the batch."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherHandle:
    """A teacher, and where it computes."""

    teacher: Teacher
    shares_policy_device: bool  # it computes where the policy does, so that one model is there at a time


@dataclass(frozen=True, slots=True)
class Teachers:
    """All teachers of a run."""

    by_key: Mapping[str, TeacherHandle]  # by the key of their section: "teacher", "teachers.math"
    key_by_task: Mapping[str, str]  # the key of each task's teacher

    async def query_each(
        self, rows: Sequence[BatchRow], query: Callable[[str, Teacher, torch.Tensor], Awaitable[AnswerT]]
    ) -> list[tuple[torch.Tensor, AnswerT]]:
        """`query(key, teacher, rows)` of every teacher that has rows: these, as [N] int64, and its answer.

        Those on devices of their own and those that are served are asked at once; those that take turns follow each
        other, each on the device only while it is asked.
        """
        row_indices: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            row_indices.setdefault(self.key_by_task[row.prompt.task_name], []).append(place)
        rows_by_teacher = {key: torch.tensor(own) for key, own in row_indices.items()}

        async def query_sequentially(some: Sequence[str]) -> list[tuple[torch.Tensor, AnswerT]]:
            return [(rows_by_teacher[key], await self._query(key, rows_by_teacher[key], query)) for key in some]

        sharing = [key for key in rows_by_teacher if self.by_key[key].shares_policy_device]
        lanes = [sharing, *([key] for key in rows_by_teacher if key not in sharing)]
        answers = await gather_or_cancel(query_sequentially(lane) for lane in lanes)
        return [answer for lane in answers for answer in lane]

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
    vocab_size: int  # of the policy: a teacher's further tokens, which pad its embedding, are none

    async def __call__(self, batch: TrainingBatch, rows: Sequence[BatchRow]) -> dict[str, float]:
        async def query(key: str, teacher: Teacher, own: torch.Tensor) -> TopK:
            return await teacher.topk_logprobs(trim(batch[own]), self.k)

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
            return await teacher.logprobs(trim(batch[own]))

        result = torch.zeros(batch[keys.TOKEN_IDS].shape)
        for own, logprobs in await self.teachers.query_each(rows, query):
            result[own, : logprobs.shape[1]] = logprobs
        batch[keys.TEACHER_LOGPROBS] = result
        return {}


@dataclass(frozen=True, slots=True)
class Distillation:
    """The stages of a step in their order; satisfies run.Algorithm."""

    config: DistillationRunConfig
    loss_fn: LossFn
    teacher_stage: TeacherStage
    placement: Placement

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> tuple[TrainingBatch, dict[str, float]]:
        with timer("data_processing"):
            batch, rows = assemble_batch(collected.groups, min_group_size=self.config.min_group_size)
        with timer("teacher_logprobs"):
            async with self.placement.teacher_phase():
                metrics = await self.teacher_stage(batch, rows)
        batch_level_metrics = batch_metrics(batch)
        if self.config.distillation.off_policy:  # nobody scores what was recorded
            batch_level_metrics = {name: value for name, value in batch_level_metrics.items() if "reward" not in name}
        return batch, {**batch_level_metrics, **metrics, **collected.metrics}
