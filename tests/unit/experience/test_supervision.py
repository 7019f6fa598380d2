"""Failures are logged and counted; the stall watchdog; the cancellation of parallel work."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nemo_rl.environments.boundary import CheckedEnvironment, error_to_failure
from nemo_rl.environments.registry import FunctionEnvironment
from nemo_rl.errors import RolloutError
from nemo_rl.experience.cancellation import cancel_tasks, gather_or_cancel, run_async
from nemo_rl.experience.failure_limits import FailureBudget, FailureLog
from nemo_rl.experience.rollouts import run_async_multi_turn_rollout, run_multi_turn_rollout_async_generation
from nemo_rl.experience.scoring import Scoring, WeightedScorer
from nemo_rl.experience.supervision import StallWatchdog, Supervision
from nemo_rl.interfaces import Environment
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import Failure, FailureClass, Prompt, StopReason, Trajectory
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.fakes.scorers import FakeScorer
from tests.unit.experience.rollout_setup import LIMITS, OPTIONS, VOCAB_SIZE, dependencies, jobs


def test_stall_names_what_is_waited_for():
    async def main() -> None:
        watchdog = StallWatchdog(0.01)

        async def work() -> None:
            with watchdog.waiting_for("generation", 2), watchdog.waiting_for("environment game"):
                await asyncio.Event().wait()

        await watchdog.guard(work())

    with pytest.raises(RolloutError, match=r"for 0\.01 s .*waiting for: environment game \(1\), generation \(2\)$"):
        asyncio.run(main())


def test_stall_outside_any_boundary_says_so():
    async def main() -> None:
        await StallWatchdog(0.01).guard(asyncio.Event().wait())

    with pytest.raises(RolloutError, match="nothing outside this process"):
        asyncio.run(main())


def test_progress_puts_the_stall_off():
    async def main() -> str:
        watchdog = StallWatchdog(2.0)

        async def work() -> str:
            for _ in range(5):
                await asyncio.sleep(1.5)
                watchdog.record_progress()
            return "ended"

        return await watchdog.guard(work())

    assert run_in_virtual_time(main()) == "ended"


async def hang(watchdog: StallWatchdog) -> None:
    with watchdog.waiting_for("generation"):
        await asyncio.Event().wait()


def test_stall_ends_all_guarded_work_at_once():
    async def main() -> tuple[list[object], float]:
        watchdog = StallWatchdog(60.0)
        guarded = [asyncio.ensure_future(watchdog.guard(hang(watchdog)))]
        await asyncio.sleep(30.0)
        guarded.append(asyncio.ensure_future(watchdog.guard(hang(watchdog))))
        errors = await asyncio.gather(*guarded, return_exceptions=True)
        return [str(error) for error in errors], asyncio.get_running_loop().time()

    errors, ended_at = run_in_virtual_time(main())
    assert ended_at == 60.0
    assert len(errors) == 2
    assert all("generation (2)" in str(error) for error in errors)


def test_time_before_the_first_guard_is_no_stall():
    async def main() -> str:
        watchdog = StallWatchdog(60.0)
        await watchdog.guard(asyncio.sleep(1.0))
        await asyncio.sleep(1000.0)  # a long training step, say
        return await watchdog.guard(asyncio.sleep(59.0, "ended"))

    assert run_in_virtual_time(main()) == "ended"


def test_work_that_ends_leaves_the_timer_to_the_rest():
    async def main() -> float:
        watchdog = StallWatchdog(60.0)
        rest = asyncio.ensure_future(watchdog.guard(hang(watchdog)))
        await watchdog.guard(asyncio.sleep(50.0))
        with pytest.raises(RolloutError):
            await rest
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == 60.0


def test_work_cancelled_as_the_timer_fires_is_cancelled_and_the_rest_stalls():
    """At 60 s, in both orders: the cancellation's timer is older than the watchdog's, or younger."""

    async def cancel_at_60(is_older: bool) -> tuple[bool, type[object]]:
        watchdog, loop = StallWatchdog(60.0), asyncio.get_running_loop()
        tasks: list[asyncio.Task[None]] = []
        if is_older:
            loop.call_at(loop.time() + 60.0, lambda: tasks[0].cancel())
        tasks += [asyncio.ensure_future(watchdog.guard(hang(watchdog))) for _ in range(2)]
        await asyncio.sleep(0)  # both are guarded now
        if not is_older:
            loop.call_at(60.0, tasks[0].cancel)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return tasks[0].cancelled(), type(outcomes[1])

    for is_older in (True, False):
        assert run_in_virtual_time(cancel_at_60(is_older)) == (True, RolloutError)


def test_watchdog_serves_one_event_loop_after_another():
    watchdog = StallWatchdog(60.0)
    for _ in range(2):
        assert run_in_virtual_time(watchdog.guard(asyncio.sleep(59.0, "ended"))) == "ended"
        with pytest.raises(RolloutError):
            run_in_virtual_time(watchdog.guard(hang(watchdog)))


def test_rollouts_that_wait_while_others_of_the_run_progress_do_not_stall():
    """As a validation whose requests queue after those of background rollouts."""

    async def main() -> list[Trajectory]:
        setup = dependencies(
            FakeGeneration(vocab_size=VOCAB_SIZE),
            {
                "game": CheckedEnvironment(FakeEnvironment(before=lambda conversations: asyncio.sleep(40.0)), 600.0),
                "queued": CheckedEnvironment(FakeEnvironment(before=lambda conversations: asyncio.sleep(100.0)), 600.0),
            },
            limits=replace(LIMITS, stall_timeout_s=60.0, max_turns=1),
        )

        async def train() -> list[Trajectory]:
            steps = [await run_async_multi_turn_rollout(jobs(1), setup, OPTIONS) for _ in range(3)]
            return [trajectory for step in steps for trajectory in step]

        validating = run_multi_turn_rollout_async_generation(jobs(1, tasks=("queued",)), setup, OPTIONS)
        trained, validated = await asyncio.gather(train(), validating)
        return [*trained, *validated]

    assert [trajectory.failure for trajectory in run_in_virtual_time(main())] == [None] * 4


def test_error_of_the_work_is_raised_as_it_is():
    async def main() -> None:
        async def work() -> None:
            raise KeyError("x")

        await StallWatchdog(60.0).guard(work())

    with pytest.raises(KeyError):
        asyncio.run(main())


def test_first_error_of_parallel_work_ends_the_others():
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def main() -> None:
        with pytest.raises(KeyError):
            await gather_or_cancel([wait(), fail(), wait()])
        assert ended == ["cleaned up"] * 2

    asyncio.run(main())


PROMPT = Prompt("p", "game", ())
DONE = Trajectory(PROMPT, "g", 0, (), StopReason.DONE)


def failed(failure_class: FailureClass, cause: str) -> Trajectory:
    return Trajectory(PROMPT, "g", 0, (), StopReason.FAILED, failure=Failure(failure_class, cause))


# ---- the log


def divide(messages: list[Any], metadata: Mapping[str, Any]) -> float:
    return 1 / (metadata["number"] - metadata["number"])


def look_up(messages: list[Any], metadata: Mapping[str, Any]) -> float:
    return metadata["no such key"]


def by_parity(messages: list[Any], metadata: Mapping[str, Any]) -> float:
    return (divide if metadata["number"] % 2 else look_up)(messages, metadata)


def records_of(environments: Mapping[str, Environment], caplog: pytest.LogCaptureFixture, **how: Any) -> list[Any]:
    """Return the records of six rollouts that all fail, at every level."""
    caplog.set_level(logging.DEBUG, logger="nemo_rl.experience.failure_limits")
    setup = dependencies(FakeGeneration(vocab_size=VOCAB_SIZE), environments, **how)
    trajectories = asyncio.run(run_async_multi_turn_rollout(jobs(6, tasks=tuple(environments)), setup, OPTIONS))
    assert all(t.failure is not None for t in trajectories)
    return [record for record in caplog.records if record.name == "nemo_rl.experience.failure_limits"]


def reward_function(name: str, function: Callable[..., Any]) -> Environment:
    return CheckedEnvironment(FunctionEnvironment(name, function, timeout_s=60.0), None)


def test_failing_reward_function_leaves_its_traceback_and_prompt_once(caplog: pytest.LogCaptureFixture) -> None:
    first, *others = records_of({"game": reward_function("game", divide)}, caplog)
    assert first.levelno == logging.WARNING
    assert "rollout of prompt p" in first.getMessage()
    assert "Traceback (most recent call last)" in first.getMessage()
    assert "in divide" in first.getMessage()
    assert "ZeroDivisionError: division by zero" in first.getMessage()
    assert [record.levelno for record in others] == [logging.DEBUG] * 5
    assert "number 6 of its kind" in others[-1].getMessage()


def test_each_failing_place_and_each_task_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    environments = {name: reward_function(name, by_parity) for name in ("game", "tools")}
    environments["other"] = reward_function("other", divide)
    records = records_of(environments, caplog)
    warned = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert len(warned) == 5
    assert sum("in look_up" in message for message in warned) == 2
    assert sum("task other" in message for message in warned) == 1


def test_failing_environment_leaves_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    async def break_down(conversations: object) -> None:
        raise RuntimeError("the board is lost")

    first, *others = records_of({"game": FakeEnvironment(before=break_down)}, caplog)
    assert (first.levelno, "in break_down" in first.getMessage()) == (logging.WARNING, True)
    assert {record.levelno for record in others} == {logging.DEBUG}


def test_failing_scorer_is_logged_once_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    broken = FakeScorer(lambda request: Failure(FailureClass.REWARD, "no score"))
    scoring = Scoring({"game": (WeightedScorer("judge", broken, 1.0),)})
    first, *others = records_of({"game": FakeEnvironment()}, caplog, scoring=scoring)
    assert (first.levelno, "judge: no score" in first.getMessage()) == (logging.WARNING, True)
    assert {record.levelno for record in others} == {logging.DEBUG}


def test_failure_without_an_exception_is_logged_once_a_task_and_class(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for failure_class in (FailureClass.AGENT, FailureClass.REWARD, FailureClass.AGENT):
        log.record(failed(failure_class, "no reward"))
    log.record(DONE)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_failure_knows_where_its_exception_was_raised() -> None:
    def fail() -> Failure:
        try:
            return Failure(FailureClass.AGENT, str(divide([], {"number": 1})))
        except ZeroDivisionError as error:
            return error_to_failure(error, FailureClass.AGENT, prefix="agent")

    failure = fail()
    assert failure.cause == "agent: ZeroDivisionError: division by zero"
    assert failure.origin.rpartition(":")[0] == __file__
    assert failure == Failure(FailureClass.AGENT, failure.cause)  # origin and traceback are for the log alone


# ---- the budget


def test_budget_allows_its_share_and_no_more():
    budget = FailureBudget(num_rollouts=4, max_failed_share=0.5)
    budget.record(failed(FailureClass.ENVIRONMENT, "first"))
    budget.record(DONE)
    budget.record(failed(FailureClass.INFRA, "second"))
    with pytest.raises(RolloutError) as error:
        budget.record(failed(FailureClass.INFRA, "third"))
    assert str(error.value) == (
        "3 of 4 rollouts failed (environment 1, infra 2); first cause: environment: first, "
        "more than rollout.max_failed_share = 0.5 allows"
    )


def test_rollouts_that_have_no_reward_because_they_are_truncated_use_no_budget():
    budget = FailureBudget(num_rollouts=1, max_failed_share=0.0)
    budget.record(failed(FailureClass.TRUNCATED, "cut off"))


def test_budget_of_everything_never_stops():
    budget = FailureBudget(num_rollouts=1, max_failed_share=1.0)
    budget.record(failed(FailureClass.REWARD, "nan"))
    assert budget.summary() == "1 of 1 rollouts failed (reward 1); first cause: reward: nan"


def test_a_task_that_swallows_its_cancellation_is_named_and_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cancel_tasks, "__defaults__", (0.05,))

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    async def work() -> int:
        tasks.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)
        return 7

    tasks: list[asyncio.Task[None]] = []
    assert run_async(work()) == 7
    [message] = caplog.messages
    assert message.startswith("abandoned task ")
    assert "stubborn at " in message
    assert "test_supervision.py:" in message
    tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]


def test_tasks_that_end_are_waited_for_and_errors_of_the_work_are_raised(caplog: pytest.LogCaptureFixture) -> None:
    ended = []

    async def orderly() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def work() -> None:
        task = asyncio.create_task(orderly())
        await asyncio.sleep(0)
        raise KeyError(task.get_name())

    with pytest.raises(KeyError):
        run_async(work())
    assert ended == [True]
    assert caplog.messages == []


def test_stall_names_the_slots_that_are_waited_for() -> None:
    async def main() -> None:
        supervision = Supervision(30.0)

        async def hold() -> None:
            async with supervision.slot("game", 1):
                await asyncio.Event().wait()

        with pytest.raises(RolloutError, match=r"waiting for: a slot of game \(max_concurrency\) \(2\)"):
            await supervision.watchdog.guard(gather_or_cancel(hold() for _ in range(3)))

    run_in_virtual_time(main())
