"""The stall watchdog and the failure budget."""

import asyncio

import pytest

from nemo_rl.errors import RolloutError
from nemo_rl.experience.boundaries import FailureBudget, StallWatchdog, gather_or_cancel
from nemo_rl.types import Failure, FailureClass, Prompt, StopReason, Trajectory

PROMPT = Prompt("p", "game", ())
DONE = Trajectory(PROMPT, "g", 0, (), StopReason.DONE)


def failed(failure_class: FailureClass, cause: str) -> Trajectory:
    return Trajectory(PROMPT, "g", 0, (), StopReason.FAILED, failure=Failure(failure_class, cause))


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
    """However slow the machine is: progress is reported in every turn of the loop, for longer than the timeout."""

    async def main() -> str:
        watchdog = StallWatchdog(0.2)
        clock = asyncio.get_running_loop().time

        async def work() -> str:
            end = clock() + 0.5
            while clock() < end:
                watchdog.record_progress()
                await asyncio.sleep(0)
            return "ended"

        return await watchdog.guard(work())

    assert asyncio.run(main()) == "ended"


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


def test_budget_of_everything_never_stops():
    budget = FailureBudget(num_rollouts=1, max_failed_share=1.0)
    budget.record(failed(FailureClass.REWARD, "nan"))
    assert budget.summary() == "1 of 1 rollouts failed (reward 1); first cause: reward: nan"
