"""math-verify in processes, and scores of reasoning_gym's verifiers, through their environments."""

import asyncio
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.composite import DatasetSpec

from nemo_rl.environments.process_pool import ProcessPool
from nemo_rl.environments.single_turn import (
    MathEnvironment,
    MathEnvironmentConfig,
    ReasoningGymEnvironment,
    ReasoningGymEnvironmentConfig,
    extract_answer,
    verify_answer,
)
from nemo_rl.errors import WorkerError
from nemo_rl.types import EnvStep, Failure, FailureClass, Message
from tests.unit.environments import custom

TASKS = ("spell_backward", "chain_sum", "number_sequence", "count_bits", "basic_arithmetic", "gcd", "leg_counting")


@pytest.mark.parametrize(
    ("reference", "response", "is_correct", "answer"),
    [
        ("72", "The answer is \\boxed{72}.", True, "72"),
        ("1/2", "So it is $0.5$.", True, "0.5"),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", True, "\\frac{2}{4}"),
        ("$x^2 + 1$", "\\boxed{1 + x^2}", True, "1 + x^2"),
        ("4 + 3 = 7\n#### 7", "7", True, "7"),
        ("72", "The answer is \\boxed{71}.", False, "71"),
        ("72", "I do not know", False, None),
    ],
)
def test_answers_equal_as_mathematics(reference: str, response: str, is_correct: bool, answer: str | None) -> None:
    correct, extracted = verify_answer(reference, response)
    assert correct is is_correct
    if answer in ("0.5", None):
        assert (extracted is None) == (answer is None)
    else:
        assert extracted == answer


def test_reference_that_is_no_mathematics_raises() -> None:
    with pytest.raises(ValueError, match="is not mathematics"):
        verify_answer("", "\\boxed{1}")


def test_environment_scores_a_batch_and_fails_items_alone() -> None:
    section = MathEnvironmentConfig.model_validate({"num_workers": 1, "verify_timeout_s": 60})
    items = [("72", "\\boxed{72}"), ("72", "\\boxed{7}"), (None, "\\boxed{1}"), ("", "\\boxed{1}")]

    async def main() -> list[EnvStep | Failure]:
        environment = MathEnvironment("math", section)
        try:
            conversations = [(Message("user", "?"), Message("assistant", text)) for _, text in items]
            states = [{} if answer is None else {"answer": answer} for answer, _ in items]
            return list(await environment.step(conversations, states))
        finally:
            await environment.close()

    right, wrong, no_answer, no_mathematics = asyncio.run(main())
    assert right == EnvStep(rewards={"math": 1.0}, state={"answer": "72"}, answer="72")
    assert wrong == EnvStep(rewards={"math": 0.0}, state={"answer": "72"}, answer="7")
    assert isinstance(no_answer, Failure)
    assert no_answer.failure_class is FailureClass.REWARD
    assert isinstance(no_mathematics, Failure)
    assert "is not mathematics" in no_mathematics.cause


def test_worker_that_hangs_dies_or_raises_fails_its_call_alone() -> None:
    async def main() -> list[object]:
        pool = ProcessPool(f"{custom.__name__}:{custom.hang_or_die.__name__}", 1, timeout_s=5.0)
        calls = [pool.call(what) for what in ("a", "hang", "b", "die", "c", "raise", "d")]
        try:
            return list(await asyncio.gather(*calls, return_exceptions=True))
        finally:
            await pool.close()

    results = asyncio.run(main())
    assert results[0::2] == ["a", "b", "c", "d"]
    assert all(isinstance(error, WorkerError) for error in results[1::2])
    assert "did not finish in 5 s" in str(results[1])
    assert "its process died" in str(results[3])
    assert "KeyError: 'lost'" in str(results[5])


# ---- reasoning_gym


def step_once(options: dict[str, Any], items: list[tuple[str, dict[str, Any]]]) -> list[EnvStep | Failure]:
    async def main() -> list[EnvStep | Failure]:
        environment = ReasoningGymEnvironment("reasoning_gym", ReasoningGymEnvironmentConfig.model_validate(options))
        try:
            conversations = [(Message("user", "?"), Message("assistant", text)) for text, _ in items]
            return list(await environment.step(conversations, [state for _, state in items]))
        finally:
            await environment.close()

    return asyncio.run(main())


def prompt_state(task: str, truncated: bool = False) -> dict[str, Any]:
    entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
    return {"task": task, "entry": entry, "response_truncated": truncated}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_right_answers_of_many_tasks_score_one_and_wrong_ones_zero(num_workers: int) -> None:
    states = {task: prompt_state(task) for task in TASKS}
    right = [(f"I think: <answer> {state['entry']['answer']} </answer>", state) for state in states.values()]
    wrong = [("<answer>none of it</answer>", state) for state in states.values()]
    results = step_once({"num_workers": num_workers}, right + wrong)
    rewards = [result.rewards["reasoning_gym"] for result in results if isinstance(result, EnvStep)]
    assert rewards == [1.0] * len(TASKS) + [0.0] * len(TASKS)


def test_entry_of_a_mixture_is_scored_by_its_own_task() -> None:
    parts = [DatasetSpec(name="gcd", weight=1, config={}), DatasetSpec(name="chain_sum", weight=1, config={})]
    mixture = reasoning_gym.create_dataset("composite", size=6, seed=1, datasets=parts)
    items = [
        (entry["answer"], {"task": "composite", "entry": entry, "response_truncated": False})
        for entry in (mixture[i] for i in range(6))
    ]
    assert [isinstance(r, EnvStep) and r.rewards["reasoning_gym"] for r in step_once({}, items)] == [1.0] * 6


def test_partial_credit_counts_only_where_asked_for() -> None:
    state = prompt_state("chain_sum")
    item = (f"The answer is {state['entry']['answer']}", state)
    (without,) = step_once({}, [item])
    (partial,) = step_once({"partial_credit": True}, [item])
    assert isinstance(without, EnvStep)
    assert isinstance(partial, EnvStep)
    assert without.rewards["reasoning_gym"] == 0.0
    assert 0.0 < partial.rewards["reasoning_gym"] < 1.0


def test_cut_response_scores_zero_where_a_stop_is_required() -> None:
    finished, cut = prompt_state("gcd"), prompt_state("gcd", truncated=True)
    items = [(state["entry"]["answer"], state) for state in (finished, cut)]
    rewards = [
        [result.rewards["reasoning_gym"] for result in step_once({"require_stop": stop}, items)]  # pyright: ignore
        for stop in (False, True)
    ]
    assert rewards == [[1.0, 1.0], [1.0, 0.0]]


def test_state_without_its_keys_or_of_no_task_fails_its_item() -> None:
    state = prompt_state("gcd")
    results = step_once({}, [("1", {}), ("1", {**state, "task": "no_such_task"}), (state["entry"]["answer"], state)])
    assert results[0] == Failure(FailureClass.REWARD, "KeyError: 'task'")
    assert results[1] == Failure(FailureClass.REWARD, "ValueError: Dataset 'no_such_task' not registered")
    assert isinstance(results[2], EnvStep)


def test_answer_is_the_last_tagged_text_or_all_of_it() -> None:
    assert extract_answer("<answer>1</answer> no: <answer> 2\n</answer> done") == "2"
    assert extract_answer(" plain ") == "plain"
    assert extract_answer("<answer>unclosed") == "<answer>unclosed"
