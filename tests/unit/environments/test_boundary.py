"""The boundary to environments: checked results, deadlines, typed failures, and blocking calls in threads."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from nemo_rl.distributed import machine
from nemo_rl.environments import boundary
from nemo_rl.environments.boundary import BlockingCalls, CheckedEnvironment
from nemo_rl.types import EnvStep, Failure, FailureClass, Message


class Scripted:
    """Gives what it was made with, raises it, or never answers."""

    def __init__(self, results: Any) -> None:
        self._results = results

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep | Failure]:
        if self._results is None:
            await asyncio.Event().wait()
        if isinstance(self._results, BaseException):
            raise self._results
        return self._results or ()

    async def close(self) -> None:
        pass


def step_two(results: Any, timeout_s: float | None = 60) -> list[EnvStep | Failure]:
    environment = CheckedEnvironment(Scripted(results), timeout_s)
    return list(asyncio.run(environment.step([(), ()], [{}, {}])))


GOOD = EnvStep(rewards={"a": 1, "b": 0.5})
OWN_FAILURE = Failure(FailureClass.REWARD, "its own")


def test_good_results_and_failures_pass() -> None:
    assert step_two([GOOD, OWN_FAILURE]) == [GOOD, OWN_FAILURE]


@pytest.mark.parametrize(
    ("results", "cause"),
    [
        ([GOOD], "EnvironmentContractError: 1 results for 2 items"),
        (RuntimeError("lost\nmore"), "RuntimeError: lost"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (KeyError(), "KeyError"),
        (asyncio.CancelledError("a worker was closed"), "CancelledError: a worker was closed"),
        (5, "TypeError: object of type 'int' has no len()"),
    ],
)
def test_exception_or_wrong_count_fails_all_items(results: Any, cause: str) -> None:
    assert step_two(results) == [Failure(FailureClass.ENVIRONMENT, cause)] * 2


def test_no_answer_before_the_deadline_fails_all_items() -> None:
    assert (
        step_two(None, timeout_s=0.05) == [Failure(FailureClass.ENVIRONMENT, "TimeoutError: no answer in 0.05 s")] * 2
    )


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf"), "1", "high", None, True])
def test_reward_that_is_no_finite_number_fails_its_item(reward: Any) -> None:
    bad, good = step_two([EnvStep(rewards={"fine": 1.0, "a": reward}), GOOD])
    assert bad == Failure(FailureClass.REWARD, f"reward 'a' is {reward!r}, not a finite number")
    assert good == GOOD


@pytest.mark.parametrize(("result", "name"), [(0.5, "float"), (None, "NoneType")])
def test_result_of_another_type_fails_its_item(result: Any, name: str) -> None:
    bad, good = step_two([result, GOOD])
    assert bad == Failure(
        FailureClass.ENVIRONMENT, f"EnvironmentContractError: a step gave {name}, not EnvStep or Failure"
    )
    assert good == GOOD


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (EnvStep(rewards=(1.0,)), "rewards and state of an EnvStep must be mappings"),  # type: ignore[arg-type]
        (EnvStep(state=None), "rewards and state of an EnvStep must be mappings"),  # type: ignore[arg-type]
        (EnvStep(observation=("hello",)), "the observation of an EnvStep must hold Messages"),  # type: ignore[arg-type]
    ],
)
def test_step_with_fields_of_another_type_fails_its_item(step: EnvStep, problem: str) -> None:
    bad, good = step_two([step, GOOD])
    assert bad == Failure(FailureClass.ENVIRONMENT, f"EnvironmentContractError: {problem}")
    assert good == GOOD


def test_failure_of_a_call_keeps_its_traceback() -> None:
    (failure, _) = step_two(RuntimeError("lost\nmore"))
    assert isinstance(failure, Failure)
    assert "in step\n" in failure.traceback
    assert failure.traceback.rstrip().endswith("RuntimeError: lost\nmore")


def test_cancelled_caller_is_cancelled() -> None:
    async def main() -> None:
        environment = CheckedEnvironment(Scripted(None), None)
        task = asyncio.ensure_future(environment.step([()], [{}]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


# ---- blocking calls


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


def test_calls_one_after_another_share_a_thread_and_one_that_hangs_keeps_its_own() -> None:
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
    monkeypatch.setattr(boundary, "IDLE_THREAD_S", 0.05)
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
    monkeypatch.setattr(boundary, "JOIN_S", 60.0)

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
    monkeypatch.setattr(boundary, "JOIN_S", 60.0)
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
    calls, release = BlockingCalls("test", 2), threading.Event()

    async def leave() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await calls.run(release.wait, timeout_s=0.0)

    asyncio.run(leave())

    async def again() -> int:
        return await asyncio.wait_for(calls.run(lambda: 3), 60)

    assert asyncio.run(again()) == 3
    release.set()
    assert asyncio.run(again()) == 3


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
