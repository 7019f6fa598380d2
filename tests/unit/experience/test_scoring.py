import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from nemo_rl.errors import RolloutError
from nemo_rl.experience.rollout_dispatch import run_rollouts
from nemo_rl.experience.rollouts import (
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_multi_turn_rollout_async_generation,
)
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.interfaces import Scorer
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import Failure, FailureClass, GenerationRequest, ResponseFault, ScoreRequest, Trajectory
from tests.fakes.environments import FakeEnvironment, reward_by_length
from tests.fakes.generation import FakeGeneration
from tests.fakes.scorers import FakeScorer
from tests.unit.experience.rollout_setup import LIMITS, OPTIONS, VOCAB_SIZE, dependencies, jobs

SCHEDULERS = (run_async_multi_turn_rollout, run_multi_turn_rollout_async_generation, run_multi_turn_rollout)


def scoring(**scorers: Scorer) -> Scoring:
    return Scoring({"game": tuple(WeightedScorer(name, scorer, 2.0) for name, scorer in scorers.items())})


def rollouts(scheduler, the_scoring: Scoring, *, tasks: Sequence[str] = ("game",), **changes) -> tuple[Trajectory, ...]:
    environments = {task: FakeEnvironment(reward_by_length) for task in tasks}
    setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), environments, scoring=the_scoring)
    return asyncio.run(scheduler(jobs(4, tasks=tasks), setup, replace(OPTIONS, **changes)))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scores_add_to_the_rewards_of_the_environment_by_name_and_weight(scheduler) -> None:
    number = FakeScorer(lambda request: float(request.metadata["number"]))
    reported: list[Trajectory] = []
    trajectories = rollouts(scheduler, scoring(number=number), progress=reported.append)
    for i, trajectory in enumerate(trajectories):
        assert trajectory.rewards["number"] == 2.0 * i
        assert trajectory.reward == trajectory.rewards["length"] + 2.0 * i
    assert sorted(t.rewards["number"] for t in reported) == [0.0, 2.0, 4.0, 6.0]


def test_scores_are_those_of_the_policy_that_speaks() -> None:
    (one, *_) = rollouts(run_async_multi_turn_rollout, Scoring())
    spoke = replace(one, policy_rewards={"first": one.rewards})

    async def scored(scorer: Scorer) -> Trajectory:
        return await scoring(judge=scorer).score(spoke, StallWatchdog(60))

    good = asyncio.run(scored(FakeScorer(lambda request: 3.0)))
    assert good.policy_rewards == {"first": good.rewards} == {"first": {**one.rewards, "judge": 6.0}}
    bad = asyncio.run(scored(FakeScorer(lambda request: Failure(FailureClass.REWARD, "no score"))))
    assert (bad.rewards, bad.policy_rewards) == ({}, {})


def test_tasks_without_scorers_are_not_scored() -> None:
    number = FakeScorer()
    trajectories = rollouts(run_async_multi_turn_rollout, scoring(number=number), tasks=("game", "other"))
    assert [("number" in t.rewards) for t in trajectories] == [True, False, True, False]
    assert sum(number.batch_sizes) == 2


def fails_the_second(request: ScoreRequest) -> float | Failure:
    return Failure(FailureClass.REWARD, "no score") if request.metadata["number"] == 1 else 1.0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_rollout_whose_score_fails_has_failed_and_has_no_reward(scheduler) -> None:
    trajectories = rollouts(scheduler, scoring(a=FakeScorer(), judge=FakeScorer(fails_the_second)))
    assert [t.failure is not None for t in trajectories] == [False, True, False, False]
    assert trajectories[1].rewards == {}
    assert trajectories[1].failure == Failure(FailureClass.REWARD, "judge: no score")


def test_a_response_that_cannot_be_scored_earns_the_lowest_reward_and_is_counted() -> None:
    scores: list[float | ResponseFault] = [ResponseFault("too_long"), -3.0, 1.0, ResponseFault("too_long")]
    scorer = FakeScorer(lambda request: scores[request.metadata["number"]])
    weighted = Scoring({"game": (WeightedScorer("judge", scorer, 2.0),)})

    unscored = rollouts(run_async_multi_turn_rollout, Scoring())

    async def main() -> list[Trajectory]:
        return [await weighted.score(one, StallWatchdog(60)) for one in unscored]

    scored = asyncio.run(main())
    assert [t.rewards["judge"] for t in scored] == [0.0, -6.0, 2.0, -6.0]
    assert [t.response_faults for t in scored] == [("too_long",), (), (), ("too_long",)]
    assert not any(t.failure for t in scored)


@pytest.mark.parametrize("scheduler", [run_async_multi_turn_rollout, run_multi_turn_rollout_async_generation])
def test_the_first_score_begins_before_the_last_generation_ends(scheduler) -> None:
    scored = asyncio.Event()

    async def wait_for_a_score(request: GenerationRequest) -> None:
        if request.session_id == "0:p3:0":
            await scored.wait()

    async def tell(requests: Sequence[ScoreRequest]) -> None:
        scored.set()

    async def main() -> tuple[Trajectory, ...]:
        engine = FakeGeneration(vocab_size=VOCAB_SIZE, latency=wait_for_a_score)
        environments = {"game": FakeEnvironment(reward_by_length), "b": FakeEnvironment(reward_by_length)}
        setup = dependencies(engine, environments, scoring=scoring(number=FakeScorer(before=tell)))
        return await scheduler(jobs(4, tasks=("game", "b")), setup, OPTIONS)  # the last one is of another task

    assert all(t.failure is None for t in asyncio.run(main()))


def test_scorers_that_share_the_engines_device_score_in_their_turn_behind_the_last_rollout() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        events.append("engine sleeps")
        yield
        events.append("engine wakes")

    async def tell(requests: Sequence[ScoreRequest]) -> None:
        events.append("score")

    async def ends(request: GenerationRequest) -> None:
        events.append("generate")

    async def main() -> tuple[Trajectory, ...]:
        engine = FakeGeneration(vocab_size=VOCAB_SIZE, latency=ends)
        the_scoring = replace(scoring(judge=FakeScorer(fails_the_second, before=tell)), turn=turn)
        setup = dependencies(engine, {"game": FakeEnvironment(reward_by_length)}, scoring=the_scoring)
        options = replace(OPTIONS, progress=lambda t: events.append(f"{t.stop_reason}"))
        return await run_rollouts(jobs(2), setup, options, run_async_multi_turn_rollout)

    scored, failed = asyncio.run(main())
    assert scored.rewards["judge"] == 2.0
    assert failed.failure is not None
    assert events[:6] == ["generate", "generate", "engine sleeps", "score", "score", "engine wakes"]
    assert sorted(events[6:]) == sorted([str(scored.stop_reason), "failed"])


def test_the_engine_does_not_sleep_where_there_is_nothing_to_score() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        events.append("engine sleeps")
        yield

    async def main() -> tuple[Trajectory, ...]:
        environments = {"game": FakeEnvironment(reward_by_length)}
        setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), environments, scoring=Scoring({}, turn=turn))
        return await run_rollouts(jobs(2), setup, OPTIONS, run_async_multi_turn_rollout)

    assert all(trajectory.failure is None for trajectory in asyncio.run(main()))
    assert events == []


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scorer_that_never_answers_ends_the_rollouts_with_its_name_and_leaves_nothing_behind(scheduler) -> None:
    async def hang(requests: Sequence[ScoreRequest]) -> None:
        await asyncio.Event().wait()

    async def main() -> int:
        setup = dependencies(
            FakeGeneration(vocab_size=VOCAB_SIZE),
            {"game": FakeEnvironment(reward_by_length)},
            limits=replace(LIMITS, stall_timeout_s=0.2),
            scoring=scoring(judge=FakeScorer(before=hang)),
        )
        with pytest.raises(RolloutError, match="waiting for: scorer "):
            await scheduler(jobs(3), setup, OPTIONS)
        return len(asyncio.all_tasks())

    assert run_in_virtual_time(main()) == 1
