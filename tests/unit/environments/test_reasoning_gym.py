"""The environment `reasoning_gym`."""

import asyncio
from pathlib import Path
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


def test_right_answers_of_many_tasks_score_one_and_wrong_ones_zero() -> None:
    states = {task: prompt_state(task) for task in TASKS}
    right = [(f"I think: <answer> {state['entry']['answer']} </answer>", state) for state in states.values()]
    wrong = [("<answer>none of it</answer>", state) for state in states.values()]
    results = step_once({}, right + wrong)
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
    assert results[1] == Failure(FailureClass.REWARD, "WorkerError: ValueError: Dataset 'no_such_task' not registered")
    assert isinstance(results[2], EnvStep)


def test_answer_is_the_last_tagged_text_or_all_of_it() -> None:
    assert extract_answer("<answer>1</answer> no: <answer> 2\n</answer> done") == "2"
    assert extract_answer(" plain ") == "plain"
    assert extract_answer("<answer>unclosed") == "<answer>unclosed"


# Each task here hands an answer to `eval`, or to sympy's parser, which evaluates it.
EVALUATING_TASKS = (
    *("string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24"),
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),
)


def test_answers_are_not_executed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    code = f"<answer>__import__('os').system('touch {tmp_path}/executed')</answer>"
    forged = "<answer>[c for c in ().__class__.__base__.__subclasses__() if setattr(c, 'score_answer', 1)]</answer>"
    states = [prompt_state(task) for task in EVALUATING_TASKS]
    results = step_once({}, [(text, state) for state in states for text in (code, forged, state["entry"]["answer"])])
    rewards = [result.rewards["reasoning_gym"] for result in results if isinstance(result, EnvStep)]
    assert rewards == [0.0, 0.0, 1.0] * len(EVALUATING_TASKS)
    assert "foreign_code" in {result.response_fault for result in results if isinstance(result, EnvStep)}
    assert list(tmp_path.iterdir()) == []


def test_answer_that_computes_without_end_is_wrong_and_the_next_is_scored() -> None:
    state, other = prompt_state("simple_integration"), prompt_state("gcd")
    items = [("<answer>9**9**9</answer>", state), (other["entry"]["answer"], other)]
    bomb, right = step_once({"verify_timeout_s": 1}, items)
    assert isinstance(bomb, EnvStep)
    assert (bomb.rewards, bomb.response_fault) == ({"reasoning_gym": 0.0}, "verifier_timeout")
    assert isinstance(right, EnvStep)
    assert right.rewards == {"reasoning_gym": 1.0}


@pytest.mark.parametrize(("task", "field"), [("bitwise_arithmetic", "metadata"), ("number_sorting", "answer")])
def test_row_that_is_code_fails_without_being_executed(task: str, field: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    state = prompt_state(task)
    code = f"__import__('os').system('touch {tmp_path}/executed')"
    state["entry"][field] = {**state["entry"]["metadata"], "problem": code} if field == "metadata" else code
    (result,) = step_once({}, [("[1]", state)])
    assert isinstance(result, Failure)
    assert f"the entry of task {task!r} is no mathematics: it uses '__import__'" in result.cause
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spelling", ["0x{:x}", "1_{:03d}", "{}e0", "{} # 1", "{}!", "int({})"])
@pytest.mark.parametrize("task", ["countdown", "puzzle24"])
def test_numbers_in_other_spellings_win_no_arithmetic_game(task: str, spelling: str) -> None:
    """The verifiers read an answer's numbers from its decimal digits, so that these would count as none."""
    state = prompt_state(task)
    metadata = state["entry"]["metadata"]
    target = metadata.get("target", 24)
    numbers = " + ".join(map(str, metadata["numbers"]))
    cheats = [f"{spelling.format(target)} + 0*({numbers})", f"{target} + 0*({numbers}) - 0", f"{target} # {numbers}"]
    results = step_once({}, [(f"<answer>{cheat}</answer>", state) for cheat in cheats])
    assert [result.rewards["reasoning_gym"] for result in results if isinstance(result, EnvStep)] == [0.0] * 3


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("game_of_life_halting", ["x", "0", "not", "truefalse"]),
        ("coin_flip", ["0", "0.", "-0.0", "1/0"]),
        ("complex_arithmetic", ["nan", "NaN", "nan+nanj", "nanj"]),
    ],
)
def test_answers_that_a_verifier_takes_for_right_by_mistake(task: str, answers: list[str]) -> None:
    state = prompt_state(task)
    results = step_once({"partial_credit": True}, [(answer, state) for answer in (*answers, state["entry"]["answer"])])
    rewards = [result.rewards["reasoning_gym"] for result in results if isinstance(result, EnvStep)]
    assert rewards == [0.0] * len(answers) + [1.0]
