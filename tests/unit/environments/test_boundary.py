"""The boundary to environments: checked results, deadlines, typed failures."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
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


@pytest.mark.parametrize("name", ["a", "verifier_timeout", "a" * 64])
def test_response_fault_leaves_the_reward_as_it_is(name: str) -> None:
    faulty = replace(GOOD, response_fault=name)
    assert step_two([faulty, GOOD]) == [faulty, GOOD]


@pytest.mark.parametrize("name", ["", "a" * 65, "verifier_timeout\n", "Timeout", "é"])
def test_response_fault_that_is_no_name_fails_its_item(name: str) -> None:
    bad, good = step_two([replace(GOOD, response_fault=name), GOOD])
    assert isinstance(bad, Failure)
    assert bad.failure_class is FailureClass.ENVIRONMENT
    assert good == GOOD


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
        (
            EnvStep(response_fault="verifier timeout"),
            "response_fault is 'verifier timeout', not None or a name of at most 64 letters a to z and underscores",
        ),
        (
            EnvStep(response_fault="a/b"),
            "response_fault is 'a/b', not None or a name of at most 64 letters a to z and underscores",
        ),
        (
            EnvStep(response_fault=1),  # type: ignore[arg-type]
            "response_fault is 1, not None or a name of at most 64 letters a to z and underscores",
        ),
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
