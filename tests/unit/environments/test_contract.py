"""The bounds of one step, whatever the environment does."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from nemo_rl.environments.boundary import CheckedEnvironment
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
        if isinstance(self._results, Exception):
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
    ],
)
def test_exception_or_wrong_count_fails_all_items(results: Any, cause: str) -> None:
    assert step_two(results) == [Failure(FailureClass.ENVIRONMENT, cause)] * 2


def test_no_answer_before_the_deadline_fails_all_items() -> None:
    assert (
        step_two(None, timeout_s=0.05) == [Failure(FailureClass.ENVIRONMENT, "TimeoutError: no answer in 0.05 s")] * 2
    )


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", None, True])
def test_reward_that_is_no_finite_number_fails_its_item(reward: Any) -> None:
    bad, good = step_two([EnvStep(rewards={"a": reward}), GOOD])
    assert bad == Failure(FailureClass.REWARD, f"reward 'a' is {reward!r}, not a finite number")
    assert good == GOOD


def test_result_of_another_type_fails_its_item() -> None:
    bad, good = step_two([0.5, GOOD])
    assert bad == Failure(
        FailureClass.ENVIRONMENT, "EnvironmentContractError: a step gave float, not EnvStep or Failure"
    )
    assert good == GOOD
