"""Calls that raise are made again for each item: how often, when, with which state, and what fails in the end."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from nemo_rl.config.environment import BatchingConfig, CallRetriesConfig
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.environments.registry import FunctionEnvironment
from nemo_rl.errors import EnvironmentContractError
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

RETRIES = CallRetriesConfig(max_retries=2, backoff_s=1.0)


class Flaky:
    """Raises what `raises` gives for an item's number and try; `calls` has the time and the numbers of each call."""

    def __init__(self, raises: Callable[[int, int], Exception | None], takes_s: float = 0.0) -> None:
        self.calls: list[tuple[float, list[int]]] = []
        self.running = self.most_running = 0
        self._raises = raises
        self.takes_s = takes_s
        self._tries: dict[int, int] = {}

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep]:
        self.calls.append((asyncio.get_running_loop().time(), [state["number"] for state in states]))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.takes_s)
        self.running -= 1
        for state in states:
            number = state["number"]
            state["seen"].append("once")  # in place: what is tried again must not see it
            self._tries[number] = self._tries.get(number, 0) + 1
            if (error := self._raises(number, self._tries[number])) is not None:
                raise error
        return [EnvStep(rewards={"seen": float(len(state["seen"]))}, state=state) for state in states]


async def step(environment: Any, count: int) -> Sequence[EnvStep | Failure]:
    return await environment.step([(Message("user", "?"),)] * count, [{"number": i, "seen": []} for i in range(count)])


def checked(inner: Any, timeout_s: float, batching: BatchingConfig | None = None) -> CheckedEnvironment:
    return CheckedEnvironment(inner, timeout_s, batching, RETRIES)


def refused(number: int) -> Failure:
    return Failure(FailureClass.ENVIRONMENT, f"ConnectionError: 503 for {number}")


def test_an_exception_costs_the_item_that_causes_it_and_no_other() -> None:
    inner = Flaky(lambda number, tries: ConnectionError(f"503 for {number}") if number == 3 else None)
    results = run_in_virtual_time(step(checked(inner, 60), 8))
    assert results[3] == refused(3)
    assert [r.rewards for r in results if isinstance(r, EnvStep)] == [{"seen": 1.0}] * 7
    assert [at for at, numbers in inner.calls if 3 in numbers] == [0.0, 0.0, 2.0]  # shared, alone, after 1 * 2 s


def test_a_service_that_refuses_one_call_in_thirty_costs_nothing() -> None:
    refusals = iter(range(10**6))
    inner = Flaky(lambda number, tries: ConnectionError("503") if next(refusals) % 30 == 29 else None)
    environment = checked(inner, 60, BatchingConfig(enabled=True, max_batch_size=64))

    async def main() -> Sequence[EnvStep | Failure]:
        results = await step(environment, 512)
        await environment.close()  # of a class without one
        return results

    assert [type(result) for result in run_in_virtual_time(main())] == [EnvStep] * 512


def test_a_single_item_waits_before_it_is_tried_again_and_the_pause_doubles() -> None:
    inner = Flaky(lambda number, tries: ConnectionError(f"503 for {number}"))
    assert run_in_virtual_time(step(checked(inner, 60), 1)) == [refused(0)]
    assert [at for at, _ in inner.calls] == [0.0, 1.0, 3.0]


def test_no_call_begins_after_the_deadline_of_the_first() -> None:
    inner = Flaky(lambda number, tries: ConnectionError(f"503 for {number}"), takes_s=2.0)
    assert run_in_virtual_time(step(checked(inner, 5), 1)) == [refused(0)]
    assert [at for at, _ in inner.calls] == [0.0, 3.0]  # the third would begin at 7


def test_calls_for_items_alone_end_with_the_deadline_of_the_first() -> None:
    def raise_when_shared(number: int, tries: int) -> Exception | None:
        return ConnectionError("503") if tries == 1 else None

    inner = Flaky(raise_when_shared)

    async def main() -> float:
        call = asyncio.ensure_future(step(checked(inner, 60), 64))
        await asyncio.sleep(0.0)
        inner.takes_s = 1e6  # hangs from now on
        results = await call
        assert [result.cause for result in results if isinstance(result, Failure)] == ["ConnectionError: 503"] * 64
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == pytest.approx(60.0)


def test_a_state_that_cannot_be_copied_is_handed_on_and_not_tried_again() -> None:
    lock = threading.Lock()
    seen: list[Any] = []

    async def judge(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
        seen.append(metadata["lock"])
        if len(seen) > 1:
            raise ConnectionError("503")
        return 0.5

    environment = FunctionEnvironment("judge", judge, timeout_s=60, retries=RETRIES)

    async def main() -> list[Any]:
        return [(await environment.step([()], [{"lock": lock}]))[0] for _ in range(2)]

    first, second = run_in_virtual_time(main())
    assert isinstance(first, EnvStep)
    assert second == Failure(FailureClass.REWARD, "ConnectionError: 503")
    assert seen == [lock, lock]


def test_calls_for_items_alone_are_as_many_at_once_as_the_batching_allows() -> None:
    inner = Flaky(lambda number, tries: ConnectionError("503") if tries == 1 else None, takes_s=0.1)
    batching = BatchingConfig(enabled=True, max_batch_size=8, max_calls=2)
    results = run_in_virtual_time(step(checked(inner, 60, batching), 8))
    assert [type(result) for result in results] == [EnvStep] * 8
    assert inner.most_running == 2


@pytest.mark.parametrize("error", [EnvironmentContractError("no"), SystemExit(1)])
def test_broken_contracts_are_not_tried_again(error: Any) -> None:
    inner = Flaky(lambda number, tries: error)
    (result,) = run_in_virtual_time(step(checked(inner, 60), 1))
    assert isinstance(result, Failure)
    assert len(inner.calls) == 1


@pytest.mark.parametrize("retries", [None, CallRetriesConfig(), CallRetriesConfig(max_retries=0)])
def test_without_retries_a_call_that_raises_fails_all_its_items(retries: CallRetriesConfig | None) -> None:
    inner: Any = Flaky(lambda number, tries: ConnectionError("503 for 0") if number == 0 else None)
    assert run_in_virtual_time(step(CheckedEnvironment(inner, 60, retries=retries), 3)) == [refused(0)] * 3
    assert len(inner.calls) == 1


def test_a_reward_function_is_called_again() -> None:
    num_calls = 0

    async def judge(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2:
            raise ConnectionError("503")
        return 0.5

    environment = FunctionEnvironment("judge", judge, timeout_s=60, retries=RETRIES)
    (result,) = run_in_virtual_time(step(environment, 1))
    assert isinstance(result, EnvStep)
    assert (result.rewards, num_calls) == ({"judge": 0.5}, 2)


def test_the_first_call_that_is_made_again_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    inner = Flaky(lambda number, tries: ConnectionError("503") if tries == 1 else None)
    environment = checked(inner, 60)
    with caplog.at_level(logging.DEBUG, "nemo_rl.environments.call_retries"):
        run_in_virtual_time(step(environment, 2))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, *[logging.DEBUG] * 2]
    assert "raised ConnectionError: 503" in caplog.text
