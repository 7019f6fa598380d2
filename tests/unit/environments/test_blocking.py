"""Blocking calls in threads: results, errors, deadlines, a bound on their number."""

import asyncio
import threading

import pytest

from nemo_rl.environments.boundary import BlockingCalls


def raise_key_error() -> None:
    raise KeyError("lost")


def test_result_error_and_deadline() -> None:
    async def main() -> None:
        calls = BlockingCalls("test", 1)
        assert await calls.run(lambda: 3) == 3
        with pytest.raises(KeyError, match="lost"):
            await calls.run(raise_key_error)
        with pytest.raises(TimeoutError, match=r"no answer in 0.05 s"):
            await calls.run(threading.Event().wait, timeout_s=0.05)
        assert await calls.run(lambda: 4) == 4  # the room of the call that hangs is free again

    asyncio.run(main())


def test_no_more_calls_at_once_than_there_is_room_for() -> None:
    lock = threading.Lock()
    running = highest = 0
    both_run = threading.Barrier(2, timeout=60)

    def work() -> None:
        nonlocal running, highest
        with lock:
            running += 1
            highest = max(highest, running)
        both_run.wait()  # passes only where two run at once
        with lock:
            running -= 1

    async def main() -> None:
        calls = BlockingCalls("test", 2)
        await asyncio.gather(*(calls.run(work) for _ in range(6)))

    asyncio.run(main())
    assert highest == 2
