"""Seconds of the moves between policy and engine, by a clock that each move sets forward."""

import asyncio
from typing import Any

import pytest

from nemo_rl.algorithms.placement import Placement
from tests.support.metric_names import find_undocumented

SECONDS = {"sleep": 1.0, "wake": 2.0, "offload": 4.0, "onload": 8.0}


class Clock:
    """A clock, and a model whose moves take the seconds of SECONDS by it."""

    def __init__(self, failing: str = "") -> None:
        self.now, self.failing = 100.0, failing

    def __call__(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        async def move(*_: Any, **__: Any) -> None:
            self.now += SECONDS[name]
            if name == self.failing:
                raise RuntimeError(name)

        return move


def placed(clock: Clock, *, shares_device: bool = True) -> Placement:
    model: Any = clock
    return Placement(model, model, shares_device=shares_device, clock=clock)


async def one_step(placement: Placement) -> None:
    await placement.prepare_for_training()
    async with placement.delivery():
        pass


def test_moves_of_a_step_add_up_by_kind_and_are_taken_once() -> None:
    placement = placed(Clock())
    asyncio.run(one_step(placement))
    assert placement.take_seconds() == {"sleep": 1.0, "onload": 8.0, "offload": 4.0 + 4.0, "wake": 2.0 + 2.0}
    assert placement.take_seconds() == {}
    assert find_undocumented([f"timing/moves/{name}" for name in SECONDS]) == []


def test_models_on_their_own_devices_do_not_move() -> None:
    placement = placed(Clock(), shares_device=False)
    asyncio.run(one_step(placement))
    assert placement.take_seconds() == {}


def test_a_move_that_fails_is_counted() -> None:
    placement = placed(Clock(failing="onload"))
    with pytest.raises(RuntimeError, match="onload"):
        asyncio.run(one_step(placement))
    assert placement.take_seconds() == {"sleep": 1.0, "onload": 8.0}
