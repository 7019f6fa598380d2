"""Blocking calls on threads: results, errors, deadlines, how many threads there are, and what happens when they end."""

import asyncio
import threading
import time
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue

import pytest

from nemo_rl.distributed import machine
from nemo_rl.environments import blocking_calls
from nemo_rl.environments.blocking_calls import BlockingCalls


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


def test_stop_iteration_of_user_code_is_raised_as_a_runtime_error() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="user code raised StopIteration") as raised:
            await asyncio.wait_for(BlockingCalls("test", 1).run(lambda: next(iter(()))), 60)
        assert isinstance(raised.value.__cause__, StopIteration)

    asyncio.run(main())


def test_calls_of_one_thread_do_not_share_context_variables() -> None:
    variable = ContextVar("variable", default="")

    async def main() -> None:
        calls = BlockingCalls("test", 1)
        await calls.run(lambda: variable.set("first"))
        assert await calls.run(variable.get) == ""

    asyncio.run(main())


def test_each_call_releases_its_openmp_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(machine, "release_openmp_threads", lambda: released.append(threading.get_ident()))

    async def main() -> None:
        calls = BlockingCalls("test", 1)
        thread = await calls.run(threading.get_ident)
        assert released == [thread]
        with pytest.raises(KeyError):
            await calls.run(raise_key_error)
        assert released == [thread] * 2

    asyncio.run(main())


def test_calls_one_after_another_share_a_thread_and_one_that_hangs_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocking_calls, "ADD_THREADS_S", 60.0)  # a busy machine may not run the thread for a while
    release = threading.Event()

    async def main() -> None:
        calls = BlockingCalls("test", 1)
        first = await calls.run(threading.get_ident)
        assert {await calls.run(threading.get_ident) for _ in range(20)} == {first}
        with pytest.raises(TimeoutError):
            await calls.run(release.wait, timeout_s=0.05)
        assert await calls.run(threading.get_ident) != first

    asyncio.run(main())
    release.set()


def test_threads_without_a_call_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_calls, "IDLE_THREAD_S", 0.05)
    threads: list[threading.Thread] = []

    async def main() -> None:
        calls = BlockingCalls("test", 1)
        for _ in range(2):  # the second one's thread is another
            await calls.run(lambda: threads.append(threading.current_thread()))
            await asyncio.to_thread(threads[-1].join, 60)
            assert not threads[-1].is_alive()

    asyncio.run(main())
    assert threads[0] is not threads[1]


def test_one_thread_makes_quick_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_calls, "ADD_THREADS_S", 60.0)

    async def main() -> None:
        calls = BlockingCalls("test", 100)
        threads = await asyncio.gather(*(calls.run(threading.get_ident) for _ in range(100)))
        assert len(set(threads)) == 1
        assert await asyncio.gather(*(calls.run(partial(int, str(i))) for i in range(100))) == list(range(100))

    asyncio.run(main())


def test_calls_behind_one_that_blocks_get_threads_of_their_own() -> None:
    all_run = threading.Barrier(16, timeout=60)

    async def main() -> None:
        calls = BlockingCalls("test", 16)
        await asyncio.gather(*(calls.run(all_run.wait) for _ in range(16)))

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_its_turn_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_calls, "ADD_THREADS_S", 60.0)
    release, made = threading.Event(), []

    async def main() -> None:
        calls = BlockingCalls("test", 2)
        first = asyncio.ensure_future(calls.run(release.wait))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await calls.run(lambda: made.append(True), timeout_s=0.05)
        release.set()
        assert await first
        assert await calls.run(lambda: 3) == 3

    asyncio.run(main())
    assert made == []


def test_a_loop_that_ends_with_calls_leaves_the_next_one_free() -> None:
    calls, release = BlockingCalls("test", 1), threading.Event()

    async def leave() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await calls.run(release.wait, timeout_s=0.0)

    asyncio.run(leave())

    async def again() -> list[int]:
        return await asyncio.wait_for(asyncio.gather(*(calls.run(lambda: 3) for _ in range(3))), 60)

    assert asyncio.run(again()) == [3] * 3
    release.set()
    assert asyncio.run(again()) == [3] * 3


def test_a_message_that_comes_as_an_idle_thread_gives_up_is_not_left_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop has taken the thread from the idle ones, then the thread's wait ends, then the message is sent."""

    class LateMessages(SimpleQueue[None]):
        def put(self, item: None) -> None:
            threading.Timer(0.2, super().put, (item,)).start()

    monkeypatch.setattr(blocking_calls, "SimpleQueue", LateMessages)
    monkeypatch.setattr(blocking_calls, "IDLE_THREAD_S", 0.1)
    release = threading.Event()

    async def main() -> None:
        calls = BlockingCalls("test", 2)
        await calls.run(lambda: None)
        blocked = asyncio.ensure_future(calls.run(release.wait))
        await asyncio.sleep(0.5)
        assert calls._idle == []  # the thread that is busy is not listed
        assert await calls.run(lambda: 3, timeout_s=60) == 3
        release.set()
        await blocked

    asyncio.run(main())


def test_calls_beside_one_that_hangs_do_not_wait_for_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_calls, "ADD_THREADS_S", 60.0)
    release = threading.Event()

    async def main() -> None:
        calls = BlockingCalls("test", 1)
        with pytest.raises(TimeoutError):
            await calls.run(release.wait, timeout_s=0.05)
        for _ in range(3):
            assert await asyncio.wait_for(calls.run(lambda: 3), 30) == 3

    asyncio.run(main())
    release.set()


def test_a_call_cancelled_as_its_end_is_told_is_not_counted_as_abandoned() -> None:
    async def main() -> None:
        calls = BlockingCalls("test", 1)
        task = asyncio.ensure_future(calls.run(lambda: None))
        await asyncio.sleep(0)
        while not calls._ended:  # without a turn of the event loop, which would tell the caller
            time.sleep(0.001)  # noqa: ASYNC251
        task.cancel()  # cancels the future at once, and the task in its next turn
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert calls._num_abandoned == 0

    asyncio.run(main())


def test_a_system_without_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []

    class Refused(threading.Thread):
        def start(self) -> None:
            starts.append(1)
            raise RuntimeError("can't start new thread")

    async def main() -> None:
        calls = BlockingCalls("test", 8)
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", Refused)
            with pytest.raises(RuntimeError, match="can't start"):
                await calls.run(lambda: made.append(0))
        await calls.run(lambda: None)  # one thread
        monkeypatch.setattr(threading, "Thread", Refused)
        await asyncio.gather(*(calls.run(partial(made.append, i)) for i in range(1, 9)))

    made: list[int] = []
    asyncio.run(main())
    assert sorted(made) == list(range(1, 9))  # not the refused one


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
