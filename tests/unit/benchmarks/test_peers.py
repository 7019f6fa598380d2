"""benchmarks/peers.py: the race of two trainers to an accuracy."""

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("peers")


class Racer:
    """A trainer whose accuracy reaches the level after `steps` steps."""

    def __init__(self, name: str, *, seconds: float, steps: int) -> None:
        self.name = name
        self.start_s = 10.0
        self._seconds = seconds
        self._steps = steps
        self.commands: list[str] = []

    def tell(self, command: str) -> None:
        self.commands.append(command)

    def answer(self) -> dict[str, float]:
        if self.commands[-1] == "step":
            return {"seconds": self._seconds, "reward": 0.0}
        return {"sampled": 0.9 if self.commands.count("step") >= self._steps else 0.1, "greedy": 0.0}


def raced(
    peers: Any, monkeypatch: pytest.MonkeyPatch, own_steps: int, trl_steps: int
) -> tuple[dict[str, Any], dict[str, Racer]]:
    sides = {"trl": Racer("trl", seconds=1.0, steps=trl_steps), "own": Racer("own", seconds=0.5, steps=own_steps)}

    async def make_work(*_: Any, **__: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(peers, "make_work", make_work)
    monkeypatch.setattr(peers, "open_sides", lambda *_: dict(sides))
    return peers.race(0, Path("python"), 20), sides


def test_a_side_that_has_reached_the_level_takes_no_more_steps(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result, sides = raced(peers, monkeypatch, own_steps=6, trl_steps=15)
    assert (result["own"]["steps"], result["own"]["train_s"]) == (10, 5.0)  # measured every five steps
    assert (result["trl"]["steps"], result["trl"]["train_s"]) == (15, 15.0)
    assert sides["own"].commands.count("step") == 10
    assert peers.race_row(3, result) == "| 3 | 5.0 (10) | 15.0 (15) | 0.333 | 15.0 | 25.0 | 0.600 |"


def test_a_side_that_never_reaches_the_level_has_no_ratio(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = raced(peers, monkeypatch, own_steps=6, trl_steps=100)
    assert result["trl"] == {"start_s": 10.0, "steps": 20, "spent_s": 20.0, "train_s": None}
    assert "never" in peers.race_row(3, result)
