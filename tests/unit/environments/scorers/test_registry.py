import asyncio
import os
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_rl.config.registries import SCORERS
from nemo_rl.environments.scorers.registry import make_scorer
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import Failure, FailureClass, Message

HERE = "tests.unit.environments.scorers.test_registry"


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


def scores_of(entry: dict[str, Any], answers: Sequence[str]) -> list[float | Failure]:
    async def main() -> list[float | Failure]:
        scorer = make_scorer("rule", SCORERS.read(entry, "rule", key="scorers.rule"))
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
        make_scorer("rule", SCORERS.read(entry, "rule", key="scorers.rule"))
    assert caught.value.key == key
