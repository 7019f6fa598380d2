import asyncio

import pytest

from nemo_rl.distributed.endpoint import RateLimiter


class VirtualTime:
    """A clock that moves with the sleep that ends first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleeping: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleeping.append((self.now + seconds, woken))
        await woken.wait()

    async def run(self, tasks: list["asyncio.Task[None]"]) -> None:
        while not all(task.done() for task in tasks):
            for _ in range(3):
                await asyncio.sleep(0)
            if self._sleeping:
                self._sleeping.sort(key=lambda one: one[0])
                self.now, woken = self._sleeping.pop(0)
                woken.set()


def times_of(rate: float | None, units: list[float]) -> list[float]:
    """When each of the callers that all come at once is let through."""

    async def main() -> list[float]:
        time, passed = VirtualTime(), []
        limit = RateLimiter(rate, clock=lambda: time.now, sleep=time.sleep)

        async def one(count: float) -> None:
            await limit.take(count)
            passed.append(time.now)

        await time.run([asyncio.create_task(one(count)) for count in units])
        return passed

    return asyncio.run(main())


def test_sixty_requests_a_minute_are_one_a_second() -> None:
    times = times_of(60, [1.0] * 180)
    assert times == pytest.approx([float(i) for i in range(180)])
    for start in range(120):  # in any minute
        assert sum(start <= t < start + 60 for t in times) <= 60 * 1.05


def test_a_request_of_many_tokens_keeps_the_next_for_as_long() -> None:
    assert times_of(600, [50, 20, 1]) == pytest.approx([0.0, 5.0, 7.0])


def test_without_a_rate_nobody_waits() -> None:
    assert times_of(None, [100.0] * 5) == [0.0] * 5
