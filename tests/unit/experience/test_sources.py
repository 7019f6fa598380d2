"""Groups of a step: with failures and injected faults, with dynamic sampling, and from recorded responses."""

import asyncio
import json
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from nemo_rl.algorithms.advantages import GroupRelativeAdvantages
from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.errors import DataError, RolloutError
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.filtered_source import FilteredSource
from nemo_rl.experience.recorded_response_source import RecordedResponseSource
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.experience.sync_source import SyncSource, prompts_per_batch
from nemo_rl.types import (
    CollectedGroups,
    Completion,
    EnvStep,
    FailedRequest,
    Failure,
    FailureClass,
    GenerationRequest,
    Message,
    Prompt,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from tests.fakes.chat_tokenizer import chat_tokenizer
from tests.fakes.environments import FakeEnvironment, draws_of
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import LIMITS, OPTIONS, VOCAB_SIZE, dependencies, prompt


def source(
    environment: FakeEnvironment | None = None,
    *,
    num_prompts: int = 10,
    batch: int = 4,
    group: int = 2,
    epochs: int = 1,
    is_async: bool = True,
    failures: RolloutConfig | None = None,
    writer: RolloutWriter | None = None,
) -> SyncSource:
    engine = FakeGeneration(vocab_size=VOCAB_SIZE, is_async=is_async)
    return SyncSource(
        PromptLoader([prompt(i) for i in range(num_prompts)], shuffle=False, seed=0, max_epochs=epochs),
        dependencies(engine, {"game": environment or FakeEnvironment()}),
        OPTIONS,
        num_prompts_per_step=batch,
        num_generations_per_prompt=group,
        failures=failures or RolloutConfig(),
        writer=writer,
    )


def steps(the_source, count: int) -> list[CollectedGroups]:
    async def main() -> list[CollectedGroups]:
        return [await the_source.next_groups(step) for step in range(count)]

    return asyncio.run(main())


def test_groups_come_in_the_order_of_the_prompts_with_their_rollouts_in_order():
    (collected,) = steps(source(), 1)
    assert [g.prompt.prompt_id for g in collected.groups] == ["p0", "p1", "p2", "p3"]
    assert all([t.generation_index for t in g.trajectories] == [0, 1] for g in collected.groups)
    assert collected.metrics["num_rollouts"] == 8
    assert collected.metrics["avg_trajectory_age"] == 0


def test_last_step_may_be_short_and_then_the_data_is_spent():
    the_source = source()
    assert [len(s.groups) for s in steps(the_source, 3)] == [4, 4, 2]
    with pytest.raises(StopAsyncIteration):
        steps(the_source, 1)


def test_group_ids_differ_over_epochs_and_steps():
    collected = steps(source(num_prompts=2, batch=2, epochs=3), 3)
    ids = [g.group_id for one in collected for g in one.groups]
    assert ids == ["0:p0:0", "0:p1:1", "1:p0:2", "1:p1:3", "2:p0:4", "2:p1:5"]
    tokens = {t.message_log[-1].token_ids for one in collected for g in one.groups for t in g.trajectories}
    assert len(tokens) > 6  # another epoch has other seeds


def test_engine_without_async_generation_gives_the_same_groups():
    def logs(is_async: bool) -> list:
        (collected,) = steps(source(is_async=is_async), 1)
        return [t.message_log for g in collected.groups for t in g.trajectories]

    assert logs(True) == logs(False)


def test_resumed_source_goes_on_as_the_uninterrupted_one():
    whole, first = source(), source()
    expected = steps(whole, 2)[1]
    steps(first, 1)
    state = first.state_dict()
    assert (state["consumed_prompts"], state["epoch"]) == (4, 0)
    resumed = source()
    resumed.load_state_dict(state)
    (actual,) = steps(resumed, 1)
    assert [g.group_id for g in actual.groups] == [g.group_id for g in expected.groups]
    assert [t.message_log for g in actual.groups for t in g.trajectories] == [
        t.message_log for g in expected.groups for t in g.trajectories
    ]


def test_environment_that_always_fails_stops_the_run_within_its_bound_and_its_rollouts_are_written(tmp_path):
    async def refuse(conversations) -> None:
        raise ValueError("no judge")

    environment = FakeEnvironment(before=refuse)
    with (
        RolloutWriter(tmp_path / "train.jsonl") as writer,
        pytest.raises(RolloutError, match="first cause: environment: ValueError: no judge"),
    ):
        steps(source(environment, num_prompts=50, batch=50, writer=writer), 1)
    assert len(environment.calls) <= 100
    rows = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert 50 < len(rows) <= 100
    assert {(row["step"], row["failure"]["cause"]) for row in rows} == {(1, "ValueError: no judge")}


def test_failed_rollouts_stay_in_their_groups_and_are_counted():
    def fail_some(conversation, state):
        if state["number"] == 1:
            return Failure(FailureClass.ENVIRONMENT, "broken puzzle")
        return EnvStep(rewards={"r": 1.0})

    (collected,) = steps(source(FakeEnvironment(fail_some)), 1)
    assert [len(g.survivors) for g in collected.groups] == [2, 0, 2, 2]
    assert collected.metrics["failures/environment"] == 2


def test_all_rollouts_are_written_with_the_step_that_trains_on_them(tmp_path):
    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        steps(source(writer=writer), 2)
    rows = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8


def rewards_by_prompt(*informative: int):
    """Prompts of these numbers have rewards that differ; those of all others are equal."""

    def answer(conversation, state) -> EnvStep:
        chance = draws_of(conversation[-1].content, state["number"]).random()
        return EnvStep(rewards={"r": chance if state["number"] in informative else 0.5})

    return FakeEnvironment(answer)


def differs(group: TrajectoryGroup) -> bool:
    return len({t.reward for t in group.survivors}) > 1


def filtered(inner, *, max_batches: int = 10, min_group_size: int = 2) -> FilteredSource:
    return FilteredSource(
        inner,
        is_informative=differs,
        num_prompts_per_step=2,
        max_gen_batches=max_batches,
        min_group_size=min_group_size,
    )


def test_dynamic_sampling_fills_a_step_with_informative_groups():
    inner = source(rewards_by_prompt(1, 4, 5), num_prompts=12, batch=3)
    (collected,) = steps(filtered(inner), 1)
    assert [g.prompt.prompt_id for g in collected.groups] == ["p1", "p4"]
    metrics = collected.metrics
    assert metrics["dynamic_sampling_num_gen_batches"] == 2
    assert metrics["dynamic_sampling_num_discarded_valid_samples"] == 2  # p5
    assert metrics["num_rollouts"] == 12
    assert metrics["avg_trajectory_age"] == 0
    kept = [t.reward for g in collected.groups for t in g.trajectories]
    assert metrics["filtered_reward"] == pytest.approx(sum(kept) / 4)
    assert metrics["reward"] != metrics["filtered_reward"]


def test_dynamic_sampling_gives_up_after_its_bound():
    with pytest.raises(RolloutError, match=r"1 of a step's 2 groups .* after 3 batches \(grpo\.dynamic_sampling_max_g"):
        steps(filtered(source(rewards_by_prompt(1), num_prompts=40), max_batches=3), 1)


def test_dynamic_sampling_ends_with_what_the_data_set_leaves():
    the_source = filtered(source(rewards_by_prompt(1, 2, 9), num_prompts=10, batch=4))
    first, last = steps(the_source, 2)
    assert [g.prompt.prompt_id for g in first.groups] == ["p1", "p2"]
    assert [g.prompt.prompt_id for g in last.groups] == ["p9"]
    with pytest.raises(StopAsyncIteration):
        steps(the_source, 1)
    assert the_source.state_dict()["consumed_prompts"] == 10


def test_dynamic_sampling_leaves_groups_without_enough_survivors_out():
    def answer(conversation, state):
        if state["number"] == 0 and draws_of(conversation[-1].content).random() < 0.5:
            return Failure(FailureClass.ENVIRONMENT, "broken")
        return EnvStep(rewards={"r": draws_of(conversation[-1].content).random()})

    inner = source(FakeEnvironment(answer), batch=3, group=6)
    (collected,) = steps(filtered(inner, min_group_size=6), 1)
    assert 0 < collected.metrics["failures/environment"] < 5
    assert [g.prompt.prompt_id for g in collected.groups] == ["p1", "p2"]


def test_prompts_per_batch_rounds_up():
    assert [prompts_per_batch(4, m) for m in (1.0, 1.5, 1.6)] == [4, 6, 7]


def recorded(*responses: str | None, max_total_length: int = 100) -> RecordedResponseSource:
    prompts = [
        Prompt(f"p{i}", "math", (Message("user", "question"),), {} if text is None else {"answer": text})
        for i, text in enumerate(responses)
    ]
    loader = PromptLoader(prompts, shuffle=False, seed=0, max_epochs=1)
    return RecordedResponseSource(
        loader,
        ChatEncoder(chat_tokenizer()),
        num_prompts_per_step=2,
        max_total_length=max_total_length,
    )


def drawn(responses: RecordedResponseSource) -> list[Trajectory]:
    return [t for group in asyncio.run(responses.next_groups(0)).groups for t in group.trajectories]


def test_each_prompt_has_a_group_of_its_own_response() -> None:
    responses = recorded("a b c", "d", "e")
    first, second = drawn(responses)
    encoder = responses.encoder
    written = [encoder.decode(t.message_log[-1].token_ids).split() for t in (first, second)]
    assert written == [["a", "b", "c"], ["d"]]
    assert all(t.message_log[-1].token_ids[-1] in encoder.stop_token_ids for t in (first, second))
    assert first.message_log[-1].is_generated
    assert not any(message.is_generated for message in first.message_log[:-1])
    assert first.group_id != second.group_id
    assert first.stop_reason is StopReason.DONE
    (third,) = drawn(responses)
    assert third.message_log[-1].message.content == "e"
    with pytest.raises(StopAsyncIteration):
        asyncio.run(responses.next_groups(0))


def test_it_goes_on_where_it_was() -> None:
    responses, again = recorded("a", "b", "c"), recorded("a", "b", "c")
    drawn(responses)
    again.load_state_dict(responses.state_dict())
    (left,) = drawn(again)
    assert left.prompt.prompt_id == "p2"


def test_a_response_is_cut_where_the_sequence_ends() -> None:
    (whole,) = drawn(recorded("a b c d"))
    length = whole.num_tokens
    (cut,) = drawn(recorded("a b c d", max_total_length=length - 2))
    assert (cut.num_tokens, cut.stop_reason) == (length - 2, StopReason.TRUNCATED)


@pytest.mark.parametrize("response", [None, ""])
def test_a_row_without_a_response_is_named(response: str | None) -> None:
    with pytest.raises(DataError, match=r"p0.*off_policy"):
        drawn(recorded(response))


NUM_PROMPTS, GROUP = 40, 4
CLASSES = {FailureClass.INFRA, FailureClass.ENVIRONMENT, FailureClass.REWARD}


class FaultyEngine(FakeGeneration):
    """20% of the calls fail, by seed and attempt, so that a retry may succeed; half of them raise."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self.num_faults = 0

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        attempt = self._attempts.get(request.request_id, 0)
        draw = draws_of("engine", request.seed, attempt).random()
        if draw < 0.2:
            self._attempts[request.request_id] = attempt + 1
            self.num_faults += 1
            if draw < 0.1:
                raise ConnectionError("replica 3 is gone")
            return FailedRequest(request.request_id, "preempted")
        return await super()._answer(request)


async def fail_a_tenth(conversations) -> None:
    if draws_of("call", [m.content for m in conversations[0]]).random() < 0.1:
        raise RuntimeError("the judge broke down")


def reward_above_zero(conversation, state) -> EnvStep:
    """Every honest reward is at least 1; a twentieth of them is no number."""
    draws = draws_of("reward", [m.content for m in conversation], state["number"])
    reward = float("nan") if draws.random() < 0.05 else draws.choice((1.0, 2.0, 3.0))
    return EnvStep((Message("user", "more"),), {"score": reward}, done=draws.random() < 0.4, state=state)


def collect(*, max_retries: int) -> tuple[CollectedGroups, FaultyEngine]:
    engine = FaultyEngine()
    environments = {"game": FakeEnvironment(reward_above_zero, before=fail_a_tenth)}
    limits = replace(LIMITS, max_turns=2, max_retries=max_retries)
    source = SyncSource(
        PromptLoader([prompt(i) for i in range(NUM_PROMPTS)], shuffle=False, seed=0, max_epochs=1),
        dependencies(engine, environments, limits=limits),
        OPTIONS,
        num_prompts_per_step=NUM_PROMPTS,
        num_generations_per_prompt=GROUP,
        failures=RolloutConfig(max_failed_share=1.0),
    )
    return asyncio.run(source.next_groups(0)), engine


def failed_classes(groups: tuple[TrajectoryGroup, ...]) -> Counter[FailureClass]:
    return Counter(t.failure.failure_class for g in groups for t in g.trajectories if t.failure is not None)


def test_every_rollout_is_accounted_for():
    collected, _ = collect(max_retries=0)
    reasons = Counter(t.stop_reason for g in collected.groups for t in g.trajectories)
    assert set(reasons) == set(StopReason)
    assert reasons.total() == NUM_PROMPTS * GROUP
    failed = failed_classes(collected.groups)
    assert set(failed) == CLASSES
    assert failed.total() == reasons[StopReason.FAILED]
    assert {name: collected.metrics[f"failures/{name}"] for name in CLASSES} == failed


def test_retries_bring_back_what_infrastructure_lost():
    without, _ = collect(max_retries=0)
    with_retries, engine = collect(max_retries=3)
    assert engine.num_faults > 20
    assert failed_classes(without.groups)[FailureClass.INFRA] > 20
    assert failed_classes(with_retries.groups)[FailureClass.INFRA] < 3


def test_no_reward_is_made_up():
    collected, _ = collect(max_retries=1)
    for group in collected.groups:
        assert all(t.reward >= 1.0 for t in group.survivors)
        assert all(not t.rewards for t in group.trajectories if t.failure is not None)


def test_batch_and_baselines_hold_survivors_alone():
    collected, _ = collect(max_retries=0)
    batch, _ = assemble_batch(collected.groups, min_group_size=2)
    kept = [group for group in collected.groups if len(group.survivors) >= 2]
    assert 0 < len(kept) <= NUM_PROMPTS
    assert batch.batch_size[0] == sum(len(group.survivors) for group in kept)
    estimate = GroupRelativeAdvantages(normalize=False)
    baselines = batch["reward"] - estimate(batch)[:, 0]
    for place, group in enumerate(kept):
        of_survivors = statistics.fmean(t.reward for t in group.survivors)
        assert baselines[batch["group_id"] == place].tolist() == pytest.approx([of_survivors] * len(group.survivors))
