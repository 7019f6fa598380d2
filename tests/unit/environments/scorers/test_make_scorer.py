import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl.config.environment import ModelScorerConfig, ScorerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import SCORERS
from nemo_rl.environments.scorers.make_scorer import make_scorer
from nemo_rl.errors import ConfigError
from nemo_rl.types import Failure, FailureClass, Message, ResponseFault, ScoreRequest

HERE = "tests.unit.environments.scorers.test_make_scorer"


def length(messages: Sequence[dict[str, str]], metadata: dict[str, Any]) -> float:
    answer = messages[-1]["content"]
    if answer == "crash":
        os._exit(1)
    if answer == "raise":
        raise ValueError("no such answer")
    return float(len(answer)) + metadata["bonus"]


class Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float]:
        return [self.value] * len(requests)

    async def close(self) -> None:
        pass


def scores_of(entry: dict[str, Any], answers: Sequence[str]) -> list[float | Failure | ResponseFault]:
    async def main() -> list[float | Failure | ResponseFault]:
        scorer = make_scorer("rule", SCORERS.read(entry, "rule", key="scorers.rule"), device="cpu")
        requests = [ScoreRequest((Message("user", "q"), Message("assistant", a)), {"bonus": 0.5}) for a in answers]
        try:
            return await scorer.score(requests)
        finally:
            await scorer.close()

    return asyncio.run(main())


def test_a_rule_runs_in_a_process_whose_end_fails_one_request() -> None:
    entry = {"type": "function", "function": f"{HERE}:length", "num_workers": 1}
    good, crashed, raised, after = scores_of(entry, ["four", "crash", "raise", ""])
    assert (good, after) == (4.5, 0.5)
    assert isinstance(crashed, Failure)
    assert crashed.failure_class is FailureClass.REWARD
    assert isinstance(raised, Failure)
    assert "no such answer" in raised.cause


class BonusConfig(ScorerConfig):
    bonus: float


BONUS = Entry(BonusConfig, make=lambda name, section: Constant(section.bonus))


def test_an_entry_by_its_path_has_a_section_of_its_own() -> None:
    assert scores_of({"type": f"{HERE}:BONUS", "bonus": 3.0}, ["a"]) == [3.0]


def test_a_class_by_its_path_is_a_scorer() -> None:
    assert scores_of({"type": f"{HERE}:Constant", "kwargs": {"value": 2.0}}, ["a", "b"]) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("entry", "key", "said"),
    [
        ({"type": "rewardmodel"}, "scorers.rule.type", "did you mean reward_model"),
        ({"type": f"{HERE}:length"}, "scorers.rule.type", "type: function"),
        ({"type": f"{HERE}:Constant"}, "scorers.rule.kwargs", "cannot be constructed"),
        ({"type": "function", "function": f"{HERE}:lenght"}, "scorers.rule.function", "did you mean"),
    ],
)
def test_scorers_that_cannot_be_made_are_refused(entry: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_scorer("rule", SCORERS.read(entry, "rule", key="scorers.rule"), device="cpu")
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("wanted", "in_actor", "run_device", "num_slots", "expected"),
    [
        ("auto", True, "cpu", 0, "cpu"),  # a GPU beside a run on the CPU is not taken
        ("auto", False, "cpu", 0, "cpu"),
        ("auto", True, "cpu", 2, "cpu"),
        ("auto", False, "cuda", 0, "cuda"),
        ("auto", False, "cuda", 2, "cuda"),  # the pool's actors
        ("auto", True, "cuda", 0, "auto"),  # on whichever node Ray has room
        ("auto", False, None, 0, "auto"),
        ("cpu", False, "cuda", 0, "cpu"),
        ("cuda", True, "cpu", 0, "cuda"),
    ],
)
def test_a_reward_model_computes_on_the_runs_device_unless_its_section_names_one(
    wanted: str, in_actor: bool, run_device: Any, num_slots: int, expected: str
) -> None:
    entry = {"type": "reward_model", "model_name": "m", "device": wanted, "in_actor": in_actor}
    section = SCORERS.read(entry, "judge", key="scorers.judge")
    assert isinstance(section, ModelScorerConfig)
    placed = section.place(run_device, num_slots=num_slots)
    assert placed.device == expected
    assert (placed.in_actor, placed.num_replicas) == ((True, num_slots) if num_slots else (in_actor, 1))
