"""The stall watchdog, and the cancellation of parallel work."""

import asyncio

import pytest

from nemo_rl.errors import RolloutError
from nemo_rl.experience.supervision import StallWatchdog, gather_or_cancel


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
