"""Rows are asked of the teacher of their task, each teacher on the device only in its turn."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantages import TeacherAdvantages, clip_advantages
from nemo_rl.algorithms.teacher_stages import LogprobsStage, TeacherHandle, Teachers, TopKStage
from nemo_rl.errors import PolicyError
from nemo_rl.experience.assembly import BatchRow, assemble_batch
from nemo_rl.image_features import ImageFeatures, PlacedImage
from nemo_rl.loss_types import Normalizer, TokenScores, TopK
from nemo_rl.losses.distillation_section import DistillationLossConfig
from nemo_rl.losses.divergences import TopKDivergence
from nemo_rl.types import Message, Prompt, StopReason, TokenizedMessage, Trajectory, TrajectoryGroup
from tests.unit.algorithms.batches import make_batch


@dataclass
class Recording:
    """A teacher that answers with its own number, and writes down what it is asked."""

    name: str
    number: float
    calls: list[str] = field(default_factory=list)
    batches: list[TensorDict] = field(default_factory=list)

    async def logprobs(self, batch: TensorDict) -> torch.Tensor:
        self.calls.append(f"{self.name} logprobs")
        self.batches.append(batch)
        return torch.full(batch[keys.TOKEN_IDS].shape, self.number)

    async def topk_logprobs(self, batch: TensorDict, k: int) -> TopK:
        self.calls.append(f"{self.name} topk")
        self.batches.append(batch)
        shape = (*batch[keys.TOKEN_IDS].shape, k)
        return TopK(torch.arange(k).expand(shape), torch.full(shape, self.number))

    async def offload(self) -> None:
        self.calls.append(f"{self.name} offload")

    async def onload(self) -> None:
        self.calls.append(f"{self.name} onload")

    async def close(self) -> None:
        """Nothing is held."""


def row(task_name: str) -> BatchRow:
    return BatchRow(Prompt("p", task_name, ()), (), ("g", 0), 0)


ROWS = [row("math"), row("code"), row("math")]


def batch_of_three() -> TensorDict:
    """The rows of math are shorter."""
    batch = make_batch([[0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0]])
    batch[keys.LENGTHS] = torch.tensor([2, 4, 2])
    return batch


def teachers(calls: list[str], *, shares_policy_device: bool) -> tuple[Teachers, dict[str, Recording]]:
    each = {"teacher": Recording("default", -1.0, calls), "teachers.math": Recording("math", -2.0, calls)}
    seated = {key: TeacherHandle(teacher, shares_policy_device) for key, teacher in each.items()}
    return Teachers(seated, {"math": "teachers.math", "code": "teacher"}), each


def test_each_row_has_the_scores_of_its_tasks_teacher() -> None:
    asked, each = teachers([], shares_policy_device=False)
    batch = batch_of_three()
    asyncio.run(LogprobsStage(asked)(batch, ROWS))
    assert batch[keys.TEACHER_LOGPROBS].tolist() == [[-2.0, -2.0, 0, 0], [-1.0] * 4, [-2.0, -2.0, 0, 0]]
    assert [len(b) for b in each["teachers.math"].batches] == [2]
    assert each["teachers.math"].batches[0][keys.TOKEN_IDS].shape == (2, 2)  # without the padding of longer rows


def image_batch() -> TensorDict:
    """The first row, of math, has an image."""
    batch = batch_of_three()
    image = ImageFeatures("a" * 64, {"pixel_values": np.zeros((1, 2), np.float32)}, 1)
    keys.add_images(batch, [[PlacedImage(image, (0,))], [], []])
    return batch


@pytest.mark.parametrize("stage", [TopKStage, LogprobsStage])
def test_images_of_rollouts_are_refused_by_a_teacher_that_reads_text(stage: type) -> None:
    asked, _ = teachers([], shares_policy_device=False)
    made = stage(asked, 2, 8) if stage is TopKStage else stage(asked)
    with pytest.raises(PolicyError, match=r"the rollouts have images; teachers\.math reads text"):
        asyncio.run(made(image_batch(), ROWS))


def test_only_teachers_of_rows_with_images_need_to_see() -> None:
    asked, each = teachers([], shares_policy_device=False)
    math = asked.by_key["teachers.math"]
    asked = replace(asked, by_key={**asked.by_key, "teachers.math": replace(math, sees=True)})
    asyncio.run(LogprobsStage(asked)(image_batch(), ROWS))
    (seen,), (text,) = each["teachers.math"].batches, each["teacher"].batches
    assert seen[keys.IMAGE_ROWS].tolist() == [[0, -1], [-1, -1]]
    assert [image.digest for image in seen[keys.IMAGES].images] == ["a" * 64]
    assert keys.IMAGES not in text
    assert keys.IMAGE_ROWS not in text


def test_topk_is_widened_to_the_batch_and_padding_tokens_of_the_teachers_embedding_are_none() -> None:
    asked, _ = teachers([], shares_policy_device=False)
    batch = batch_of_three()
    asyncio.run(TopKStage(asked, k=3, vocab_size=2)(batch, ROWS))
    assert batch[keys.TEACHER_TOPK_IDS].shape == batch[keys.TEACHER_TOPK_LOGPROBS].shape == (3, 4, 3)
    assert batch[keys.TEACHER_TOPK_IDS][1, 3].tolist() == [0, 1, -1]
    assert batch[keys.TEACHER_TOPK_LOGPROBS][:, 1, 0].tolist() == [-2.0, -1.0, -2.0]


class PaddedTeacher(Recording):
    """A teacher of more rows than the student: its third token is a row that only pads its embedding."""

    ids: tuple[int, ...] = (0, 1, 3)

    async def topk_logprobs(self, batch: TensorDict, k: int) -> TopK:
        shape = (*batch[keys.TOKEN_IDS].shape, k)
        return TopK(torch.tensor(self.ids).expand(shape), torch.tensor([0.5, 0.2, 0.15]).log().expand(shape))


@pytest.mark.parametrize(
    ("kl_type", "zero_outside_topk", "expected"),
    [
        # p = (5/7, 2/7), q = (2/3, 1/3): 5/7 log(15/14) + 2/7 log(6/7)
        ("forward", False, 0.0052376),
        # 2/3 log(14/15) + 1/3 log(7/6)
        ("reverse", False, 0.0053883),
        # q = (1/2, 1/4): 5/7 log(10/7) + 2/7 log(8/7)
        ("forward", True, 0.2929196),
    ],
)
def test_row_that_pads_the_teachers_embedding_is_no_target(
    kl_type: str, zero_outside_topk: bool, expected: float
) -> None:
    """The student has rows 0 to 2 and q = (1/2, 1/4, 1/4); the teacher has p = (.5, .2, ...) and .15 on its row 3."""
    asked = Teachers({"teacher": TeacherHandle(PaddedTeacher("t", 0.0), False)}, {"math": "teacher"})
    batch = make_batch([[0, 1]])
    batch[keys.LENGTHS] = torch.tensor([2])
    asyncio.run(TopKStage(asked, k=3, vocab_size=3)(batch, [row("math")]))
    assert batch[keys.TEACHER_TOPK_IDS][0, 1].tolist() == [0, 1, -1]

    logits = torch.tensor([0.5, 0.25, 0.25]).log().repeat(1, 2, 1).requires_grad_()
    log_q = logits.log_softmax(-1)
    candidates = log_q.gather(-1, batch[keys.TEACHER_TOPK_IDS].clamp(min=0))
    entropy = -(log_q.exp() * log_q).sum(-1) if zero_outside_topk else None
    section = DistillationLossConfig.model_validate({"kl_type": kl_type, "zero_outside_topk": zero_outside_topk})
    loss_fn = TopKDivergence(section, is_on_policy=False)
    loss, metrics = loss_fn(TokenScores(log_q[..., 0], candidates, entropy), batch, Normalizer(1, 1))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics["teacher_topk_mass"].value.item() == pytest.approx(0.7)
    loss.backward()
    if not zero_outside_topk:
        assert logits.grad is not None
        assert logits.grad[0, 1, 2].item() == pytest.approx(0, abs=1e-6)  # no stand-in for the teacher's token


def test_ids_of_the_students_last_rows_are_targets_and_those_after_them_are_none() -> None:
    """Qwen2.5 of 7B has 152,064 rows, that of 1.5B 151,936."""
    teacher = PaddedTeacher("t", 0.0)
    teacher.ids = (151_935, 151_936, 152_063)
    asked = Teachers({"teacher": TeacherHandle(teacher, False)}, {"math": "teacher"})
    batch = make_batch([[0, 1]])
    batch[keys.LENGTHS] = torch.tensor([2])
    asyncio.run(TopKStage(asked, k=3, vocab_size=151_936)(batch, [row("math")]))
    assert batch[keys.TEACHER_TOPK_IDS][0, 1].tolist() == [151_935, -1, -1]


def test_one_model_is_on_the_device_at_a_time_where_they_take_turns() -> None:
    calls: list[str] = []
    asked, _ = teachers(calls, shares_policy_device=True)
    asyncio.run(LogprobsStage(asked)(batch_of_three(), ROWS))
    assert calls == [
        "math onload",
        "math logprobs",
        "math offload",
        "default onload",
        "default logprobs",
        "default offload",
    ]


def test_teachers_with_devices_of_their_own_are_asked_at_once_and_stay_there() -> None:
    """Each waits until the other has been asked; in turns this would never end."""
    met: list[asyncio.Event] = []

    async def main() -> None:
        asked, each = teachers([], shares_policy_device=False)
        both = [asyncio.Event(), asyncio.Event()]
        met.extend(both)

        async def ask(key: str, teacher: object, own: torch.Tensor) -> str:
            mine, other = both if key == "teacher" else reversed(both)
            mine.set()
            await asyncio.wait_for(other.wait(), 60)
            return key

        answers = await asked.query_each(ROWS, ask)
        assert {key: own.tolist() for own, key in answers} == {"teachers.math": [0, 2], "teacher": [1]}
        assert all(not teacher.calls for teacher in each.values())

    asyncio.run(main())
    assert all(event.is_set() for event in met)


def test_a_teacher_that_fails_ends_the_step_with_its_own_error() -> None:
    async def main() -> None:
        asked, _ = teachers([], shares_policy_device=False)

        async def ask(key: str, teacher: object, own: torch.Tensor) -> None:
            raise ValueError(key) if key == "teacher" else asyncio.CancelledError

        await asked.query_each([row("code")], ask)

    with pytest.raises(ValueError, match="teacher"):
        asyncio.run(main())


def trajectory(group: str, index: int, *, num_chains: int = 1) -> Trajectory:
    log = (TokenizedMessage(Message("user", group), (1, 2)), TokenizedMessage(Message("assistant", "a"), (3,), (-1.0,)))
    return Trajectory(
        Prompt(group, "math", (Message("user", group),)),
        group,
        index,
        log,
        StopReason.DONE,
        other_chains=(log,) * (num_chains - 1),
    )


def test_rows_are_those_of_the_assembled_batch_also_where_a_trajectory_has_several() -> None:
    several = (trajectory("a", 1), trajectory("a", 0, num_chains=2))
    groups = [TrajectoryGroup("a", several[0].prompt, several), TrajectoryGroup("b", trajectory("b", 0).prompt, ())]
    batch, rows = assemble_batch(groups, min_group_size=1)
    assert len(rows) == len(batch) == 3
    assert [r.prompt.prompt_id for r in rows] == ["a"] * 3


def test_advantages_of_opd_are_the_teachers_log_probs_over_the_policys() -> None:
    batch = make_batch([[0, 1, 1]], prev_logprobs=[[0.0, -1.0, -4.0]], teacher_logprobs=[[0.0, -0.5, -5.0]])
    assert TeacherAdvantages()(batch).tolist() == [[0.0, 0.5, -1.0]]
    assert clip_advantages(TeacherAdvantages()(batch), -0.75, 0.25).tolist() == [[0.0, 0.25, -0.75]]
    assert TeacherAdvantages().required_keys == {keys.PREV_LOGPROBS, keys.TEACHER_LOGPROBS}
