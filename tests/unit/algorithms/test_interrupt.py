"""Stopping a run on signals."""

import asyncio
import os
import signal
import subprocess
import sys
import time

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


PROGRAM = """
import asyncio, sys
from nemo_rl.algorithms.interrupt import Interrupt, cancel_on_termination
async def main():
    interrupt = Interrupt()
    with cancel_on_termination(), interrupt.listen():
        print("ready", flush=True)
        while not interrupt.requested:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        print("saved", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("first", ["TERM", "HUP"])
@pytest.mark.parametrize("second", ["TERM", "HUP"])
def test_a_signal_that_is_repeated_at_once_still_saves(first: str, second: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for name in (first, second, second):
        process.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.05)
    assert process.communicate(timeout=60)[0] == "saved\n"
    assert process.returncode == 0


def test_a_group_that_timeout_ends_still_saves() -> None:
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)  # as `timeout` does
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "saved\n"


def test_sighup_stays_ignored_under_nohup() -> None:
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "saved\n"


def test_a_second_sigterm_after_a_while_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl.algorithms.interrupt.REPEAT_S", 0.01)

    async def main() -> None:
        with Interrupt().listen():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
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
