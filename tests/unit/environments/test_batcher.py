"""Items of concurrent calls share inner calls, and each caller gets its own results."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.environments.batcher import Batcher
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.errors import EnvironmentContractError
from nemo_rl.types import EnvStep, Failure, Message

LONG_MS = 600_000.0  # a wait that a test never sits through


def batching(**options: Any) -> BatchingConfig:
    return BatchingConfig.model_validate({"enabled": True, **options})


class Recorder:
    """Rewards each item by the number in its state; keeps the sizes of its calls; may be held by `gate`."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()
        self.closed = False

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[EnvStep]:
        numbers = [state["n"] for state in states]
        self.calls.append(numbers)
        self.called.set()
        await self.gate.wait()
        if -1 in numbers:
            raise RuntimeError("minus one")
        steps = [EnvStep(rewards={"n": float(n)}) for n in numbers]
        return steps[1:] if -2 in numbers else steps

    async def close(self) -> None:
        self.closed = True


async def ask(environment: CheckedEnvironment, *numbers: int) -> list[float | None]:
    results = await environment.step([(Message("assistant", ""),)] * len(numbers), [{"n": n} for n in numbers])
    return [result.rewards["n"] if isinstance(result, EnvStep) else None for result in results]


@pytest.mark.parametrize("count", [7, 9])
def test_counts_that_are_no_multiple_of_the_batch_size_all_resolve(count: int) -> None:
    async def main() -> None:
        inner = Recorder()
        environment = CheckedEnvironment(inner, 60, batching(max_batch_size=4, max_wait_ms=1))
        answers = await asyncio.gather(*(ask(environment, n) for n in range(count)))
        assert answers == [[float(n)] for n in range(count)]
        assert max(map(len, inner.calls)) <= 4
        assert sorted(n for call in inner.calls for n in call) == list(range(count))
        await environment.close()
        assert inner.closed

    asyncio.run(main())


def test_full_batch_goes_at_once_and_one_large_call_is_split() -> None:
    async def main() -> None:
        inner = Recorder()
        environment = CheckedEnvironment(inner, 60, batching(max_batch_size=4, max_wait_ms=LONG_MS))
        assert await asyncio.gather(ask(environment, 1, 2), ask(environment, 3, 4)) == [[1, 2], [3, 4]]
        assert await ask(environment, *range(8)) == [float(n) for n in range(8)]
        assert [len(call) for call in inner.calls] == [4, 4, 4]
        await environment.close()

    asyncio.run(main())


def test_error_or_wrong_count_fails_the_items_of_that_call_alone() -> None:
    async def main() -> None:
        environment = CheckedEnvironment(Recorder(), 60, batching(max_batch_size=2, max_wait_ms=LONG_MS))
        answers = await asyncio.gather(*(ask(environment, n) for n in (1, -1, 2, 3, 4, -2)))
        assert answers == [[None], [None], [2.0], [3.0], [None], [None]]
        await environment.close()

    asyncio.run(main())


def test_call_past_its_deadline_fails_its_items() -> None:
    async def main() -> None:
        inner = Recorder()
        inner.gate.clear()
        environment = CheckedEnvironment(inner, 0.05, batching(max_batch_size=1))
        (result,) = await environment.step([()], [{"n": 1}])
        assert isinstance(result, Failure)
        assert result.cause == "TimeoutError: no answer in 0.05 s"
        await environment.close()

    asyncio.run(main())


def test_cancelled_caller_does_not_hurt_the_others() -> None:
    async def main() -> None:
        inner = Recorder()
        inner.gate.clear()
        environment = CheckedEnvironment(inner, 60, batching(max_batch_size=2, max_wait_ms=LONG_MS))
        running = [asyncio.create_task(ask(environment, n)) for n in (1, 2)]
        await inner.called.wait()
        waiting = asyncio.create_task(ask(environment, 3))
        await asyncio.sleep(0.01)
        running[0].cancel()
        waiting.cancel()
        await asyncio.gather(running[0], waiting, return_exceptions=True)
        others = [asyncio.create_task(ask(environment, n)) for n in (4, 5, 6)]
        inner.gate.set()
        assert await running[1] == [2.0]
        await environment.close()  # answers what waits
        assert [await other for other in others] == [[4.0], [5.0], [6.0]]
        assert 3 not in {n for call in inner.calls for n in call}

    asyncio.run(main())


def test_full_queue_makes_callers_wait_and_loses_nothing() -> None:
    async def main() -> None:
        inner = Recorder()
        options = batching(max_batch_size=8, max_queue_size=2, max_wait_ms=LONG_MS)
        environment = CheckedEnvironment(inner, 60, options)
        assert await ask(environment, *range(6)) == [float(n) for n in range(6)]
        assert max(map(len, inner.calls)) <= 2
        await environment.close()

    asyncio.run(main())


def test_closed_environment_answers_what_waits_and_takes_no_more() -> None:
    async def main() -> None:
        environment = CheckedEnvironment(Recorder(), 60, batching(max_wait_ms=LONG_MS))
        waiting = asyncio.create_task(ask(environment, 1))
        await asyncio.sleep(0)
        await environment.close()
        assert await waiting == [1.0]
        with pytest.raises(EnvironmentContractError, match="closed"):
            await ask(environment, 2)

    asyncio.run(main())


def test_items_gather_while_as_many_calls_run_as_may() -> None:
    sizes: list[int] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def answer(items: list[int]) -> list[int]:
        sizes.append(len(items))
        begun.set()
        await gate.wait()
        return items

    async def main() -> list[int]:
        batcher: Batcher[int, int] = Batcher(answer, BatchingConfig(max_batch_size=4, max_wait_ms=0, max_calls=1))
        first = asyncio.create_task(batcher.submit([0]))
        await begun.wait()
        others = [asyncio.create_task(batcher.submit([i])) for i in range(1, 7)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert sizes == [1]
        gate.set()
        results = await first
        for other in others:
            results += await other
        await batcher.close()
        return results

    assert asyncio.run(main()) == list(range(7))
    assert sizes == [1, 4, 2]
