"""Scores of reasoning_gym's verifiers through the environment."""

import asyncio
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.composite import DatasetSpec

from nemo_rl.environments.reasoning_gym import ReasoningGymEnvironment, ReasoningGymEnvironmentConfig, extract_answer
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

TASKS = ("spell_backward", "chain_sum", "number_sequence", "count_bits", "basic_arithmetic", "gcd", "leg_counting")


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
