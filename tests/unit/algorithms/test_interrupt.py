import asyncio
import os
import signal

import pytest

from nemo_rl.algorithms.interrupt import Interrupt, Interrupted


async def forever() -> None:
    await asyncio.Event().wait()


async def raising(error: BaseException) -> None:
    raise error


def test_guarded_work_that_ends_gives_its_result() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 7

    async def main() -> int:
        return await Interrupt().guard(answer())

    assert asyncio.run(main()) == 7


@pytest.mark.parametrize("error", [ValueError("broken"), StopAsyncIteration()])
def test_errors_of_guarded_work_pass_through(error: Exception) -> None:
    async def main() -> None:
        await Interrupt().guard(raising(error))

    with pytest.raises(type(error)):
        asyncio.run(main())


def test_a_stop_cancels_guarded_work_and_waits_for_its_cleanup() -> None:
    seen: list[str] = []

    async def work(interrupt: Interrupt) -> None:
        interrupt.request()
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def main() -> None:
        interrupt = Interrupt()
        with pytest.raises(Interrupted):
            await interrupt.guard(work(interrupt))
        assert seen == ["cleaned up"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_work_that_is_guarded_after_the_stop_is_abandoned() -> None:
    async def main() -> None:
        interrupt = Interrupt()
        interrupt.request()
        with pytest.raises(Interrupted):
            await interrupt.guard(forever())

    asyncio.run(main())


def test_work_that_ended_when_the_stop_came_counts() -> None:
    async def work(interrupt: Interrupt) -> str:
        interrupt.request()
        return "done"

    async def main() -> str:
        interrupt = Interrupt()
        return await interrupt.guard(work(interrupt))

    assert asyncio.run(main()) == "done"


def test_cancelling_the_guard_cancels_its_work() -> None:
    async def main() -> None:
        is_cancelled = asyncio.Event()
        has_started = asyncio.Event()

        async def work() -> None:
            has_started.set()
            try:
                await forever()
            except asyncio.CancelledError:
                is_cancelled.set()
                raise

        task = asyncio.ensure_future(Interrupt().guard(work()))
        await has_started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_cancelled.is_set()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_for_the_stop(number: signal.Signals) -> None:
    async def main() -> None:
        interrupt = Interrupt()
        with interrupt.listen():
            os.kill(os.getpid(), number)
            with pytest.raises(Interrupted):
                await asyncio.wait_for(interrupt.guard(forever()), 60)
        assert interrupt.requested

    asyncio.run(main())


def test_the_second_signal_cancels_at_once() -> None:
    async def main() -> None:
        interrupt = Interrupt()
        interrupt.request()
        with interrupt.listen():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(forever(), 60)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_the_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def main() -> None:
        with Interrupt().listen():
            assert signal.getsignal(signal.SIGTERM) != before

    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before
