"""From the student's histories to what the loss compares: the teacher's own template, any text, any end."""

import asyncio
import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import PreTrainedTokenizerFast

from nemo_rl.algorithms.cross_tokenizer_stage import CrossTokenizerStage, TeacherRenderer, TeacherTargetBuilder
from nemo_rl.algorithms.cross_tokenizer_targets import TokenMap
from nemo_rl.algorithms.teacher_stages import TeacherHandle, Teachers
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.token_alignment import Vocabulary
from nemo_rl.experience.assembly import BatchRow
from nemo_rl.loss_types import TopK
from nemo_rl.quickstart.models import make_tokenizer
from nemo_rl.types import Message, MessageLog, Prompt, TokenizedMessage
from tests.templates import byte_tokenizer
from tests.templates.vocabularies import trained_tokenizer

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    ["", " two  spaces ", "東京 the", "👩‍👩‍👧", "<|im_end|>", "ﬁne"]
)


def vocabulary_of(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return Vocabulary.of(tokenizer, stop_token_ids=ChatEncoder(tokenizer).stop_token_ids)


def sampled(tokenizer: PreTrainedTokenizerFast, text: str, *, is_ended: bool = True) -> TokenizedMessage:
    token_ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    token_ids += [tokenizer.get_vocab()[str(tokenizer.eos_token)]] * is_ended
    return TokenizedMessage(Message("assistant", text), tuple(token_ids), (0.0,) * len(token_ids))


def conversation(tokenizer: PreTrainedTokenizerFast, *answers: TokenizedMessage) -> MessageLog:
    """A question to each answer."""
    encoder = ChatEncoder(tokenizer)
    log = encoder.encode_prompt((Message("user", "question 0"),))
    for number, answer in enumerate(answers, start=1):
        log = (*log, answer)
        if number < len(answers):
            log = (*log, *encoder.encode_turn(log, (Message("user", f"question {number}"),)))
    return log


def rows_of(student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, **options) -> TeacherRenderer:
    return TeacherRenderer(vocabulary_of(student), vocabulary_of(teacher), teacher, ChatEncoder(teacher), **options)


def test_the_teacher_reads_its_own_template():
    student, teacher = make_tokenizer(), byte_tokenizer("llama3")
    log = conversation(student, sampled(student, "abc"), sampled(student, "d", is_ended=False))
    row = rows_of(student, teacher).row(log)
    assert teacher.decode(list(row.token_ids)) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nquestion 0<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nabc<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nquestion 1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nd<|eot_id|>"
    )
    first, second = row.responses
    for response, message in ((first, log[1]), (second, log[3])):
        assert row.token_ids[response.teacher_start :][: len(response.teacher_ids)] == response.teacher_ids
        assert flat_token_ids(log)[response.student_start :][: len(message.token_ids)] == message.token_ids
    assert (first.is_ended, second.is_ended) == (True, False)


def test_responses_that_the_teacher_has_no_room_for_are_left_out():
    student, teacher = make_tokenizer(), byte_tokenizer("chatml")
    log = conversation(student, sampled(student, "abc"), sampled(student, "d" * 40))
    whole = rows_of(student, teacher).row(log)
    cut = rows_of(student, teacher, max_length=len(whole.token_ids) - 1).row(log)
    assert cut.responses == whole.responses[:1]
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids


QUESTION = (TokenizedMessage(Message("user", "question"), (1, 2, 3)),)


@functools.cache
def trained_rows(student_kind: str, teacher_kind: str) -> TeacherRenderer:
    return rows_of(trained_tokenizer(student_kind), trained_tokenizer(teacher_kind))


@settings(max_examples=40, deadline=None)
@given(texts, st.booleans(), st.integers(0, 3))
@pytest.mark.parametrize("student_kind", ["bytes", "byte_bpe", "sentencepiece"])
@pytest.mark.parametrize("teacher_kind", ["byte_bpe_large", "sentencepiece", "nfkc"])
def test_any_response_is_aligned_as_far_as_it_is_text(student_kind, teacher_kind, text, is_ended, num_cut):
    assume(student_kind != "sentencepiece" or not text.startswith((" ", "▁")))  # such a space is not kept
    student = trained_tokenizer(student_kind)
    token_ids = sampled(student, text, is_ended=False).token_ids
    token_ids = token_ids[: max(len(token_ids) - num_cut, 0)]  # may end inside a character
    token_ids += (student.get_vocab()[str(student.eos_token)],) * is_ended
    answer = TokenizedMessage(Message("assistant", "other"), token_ids, (0.0,) * len(token_ids))
    (response,) = trained_rows(student_kind, teacher_kind).row((*QUESTION, answer)).responses
    read = b"".join(response.teacher_pieces)
    assert read.decode()[: len(text)] == text[: len(read.decode())]
    assert b"".join(response.student_pieces[: response.num_aligned]) == read
    assert sum(span.student_end - span.student_start for span in response.spans) == response.num_aligned
    if num_cut == 0:
        assert read == text.encode()
        assert response.is_ended == is_ended


class FixedTeacher:
    """Gives every token the same distribution, and remembers what it was asked."""

    def __init__(self, probs: Sequence[float]) -> None:
        self.logprobs_by_id = torch.tensor(probs).log()
        self.asked: list[TensorDict] = []

    async def topk_logprobs(self, batch: TensorDict, k: int) -> TopK:
        self.asked.append(batch)
        shape = (*batch["token_ids"].shape, k)
        values, ids = self.logprobs_by_id.topk(k)
        return TopK(ids.expand(shape), values.expand(shape))

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...


def target_builder(
    student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, matching: str
) -> TeacherTargetBuilder:
    return TeacherTargetBuilder(
        TokenMap(vocabulary_of(student), vocabulary_of(teacher)),
        tokenizer=teacher,
        encoder=ChatEncoder(teacher),
        matching=matching,  # type: ignore[arg-type]
    )


def row_of(log: MessageLog, task_name: str = "task") -> BatchRow:
    return BatchRow(Prompt("prompt", task_name, (log[0].message,)), log, ("group", 0), 0)


def teachers(**of_task: FixedTeacher) -> Teachers:
    """A teacher a task, of that task's name."""
    seated = {task: TeacherHandle(teacher, shares_policy_device=True) for task, teacher in of_task.items()}  # type: ignore[arg-type]
    return Teachers(seated, {task: task for task in of_task})


def batch_of(logs: Sequence[MessageLog]) -> TensorDict:
    rows = [flat_token_ids(log) for log in logs]
    token_ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
    for row, ids in enumerate(rows):
        token_ids[row, : len(ids)] = torch.tensor(ids)
    mask = torch.tensor(
        [
            [float(m.is_generated) for m in log for _ in m.token_ids] + [0.0] * (token_ids.shape[1] - len(ids))
            for log, ids in zip(logs, rows, strict=True)
        ]
    )
    return TensorDict({"token_ids": token_ids, "token_mask": mask}, batch_size=[len(rows)])


@pytest.mark.parametrize("matching", ["prefix", "identical"])
def test_with_its_own_tokenizer_the_student_gets_the_teachers_tokens_at_its_own_places(matching):
    tokenizer = make_tokenizer()
    logs = [
        conversation(tokenizer, sampled(tokenizer, "ab"), sampled(tokenizer, "c")),
        conversation(tokenizer, sampled(tokenizer, "")),
    ]
    size = len(tokenizer)
    fixed = FixedTeacher((torch.arange(size) + 1.0).div((size + 1) * size / 2).tolist())
    batch = batch_of(logs)
    stage = CrossTokenizerStage(teachers(task=fixed), {"task": target_builder(tokenizer, tokenizer, matching)}, 5)
    metrics = asyncio.run(stage(batch, [row_of(log) for log in logs]))
    (asked,) = fixed.asked
    torch.testing.assert_close(asked["token_ids"], batch["token_ids"])
    is_sampled = batch["token_mask"] > 0
    torch.testing.assert_close(asked["token_mask"] > 0, is_sampled)
    torch.testing.assert_close((batch["teacher_topk_ids"] >= 0).any(-1), is_sampled)
    assert batch["teacher_topk_ids"][is_sampled][:, :5].tolist() == [[size - 1 - i for i in range(5)]] * int(
        is_sampled.sum()
    )
    assert metrics["cross_tokenizer/with_target"] == 1
    assert metrics["cross_tokenizer/teacher_tokens_per_token"] == 1
    assert metrics["cross_tokenizer/unmatched_mass"] == 0


def test_each_of_several_teachers_answers_for_its_own_rows():
    tokenizer = make_tokenizer()
    logs = [conversation(tokenizer, sampled(tokenizer, "ab")), conversation(tokenizer, sampled(tokenizer, "cd"))]
    likes_20, likes_30 = (
        FixedTeacher([0.9 if i == liked else 0.01 for i in range(len(tokenizer))]) for liked in (20, 30)
    )
    own = target_builder(tokenizer, tokenizer, "prefix")
    stage = CrossTokenizerStage(teachers(math=likes_20, code=likes_30), {"math": own, "code": own}, 1)
    batch = batch_of(logs)
    asyncio.run(stage(batch, [row_of(logs[0], "math"), row_of(logs[1], "code")]))
    assert set(batch["teacher_topk_ids"][0].flatten().tolist()) == {-1, 20}
    assert set(batch["teacher_topk_ids"][1].flatten().tolist()) == {-1, 30}
