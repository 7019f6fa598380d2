import asyncio

import pytest

from nemo_rl.observability.timer import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_blocks_of_a_name_add_up() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    for seconds in (2.0, 3.0):
        with timer("policy_training"):
            clock.now += seconds
        clock.now += 10.0
    assert timer.seconds() == {"policy_training": 5.0}


def test_nested_blocks_are_measured_apart() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with timer("total_step_time"):
        clock.now += 1.0
        with timer("generation"):
            clock.now += 2.0
        assert timer.seconds() == {"total_step_time": 3.0, "generation": 2.0}
        clock.now += 4.0
    assert timer.seconds() == {"total_step_time": 7.0, "generation": 2.0}


def test_blocks_that_overlap_in_tasks_count_once() -> None:
    clock = Clock()
    timer = StepTimer(clock)

    async def block(opened: asyncio.Event, close: asyncio.Event) -> None:
        with timer("generation"):
            opened.set()
            await close.wait()

    async def main() -> None:
        opened, closed = [asyncio.Event() for _ in range(2)], [asyncio.Event() for _ in range(2)]
        tasks = [asyncio.create_task(block(o, c)) for o, c in zip(opened, closed, strict=True)]
        for event in opened:
            await event.wait()
        for task, event in zip(tasks, closed, strict=True):
            clock.now += 5.0
            event.set()
            await task

    asyncio.run(main())
    assert timer.seconds() == {"generation": 10.0}


def test_a_block_that_raises_is_measured() -> None:
    clock = Clock()
    timer = StepTimer(clock)

    def failing() -> None:
        with timer("generation"):
            clock.now += 1.0
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    clock.now += 1.0
    assert timer.seconds() == {"generation": 1.0}


def test_names_are_told_as_their_blocks_begin() -> None:
    entered: list[str] = []
    timer = StepTimer(on_enter=entered.append)
    with timer("generation"), timer("weight_sync"):
        assert entered == ["generation", "weight_sync"]
