"""Tool calls in text, their results, the final answer, and the calculator."""

import asyncio
from typing import Any

import pytest

from nemo_rl.environments.tools import ToolsEnvironment, ToolsEnvironmentConfig, answers_match, calculate, tools_prompt
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

STATE = {"answer": "1,024"}


def step_once(texts: list[str], state: dict[str, Any] = STATE) -> list[EnvStep | Failure]:
    section = ToolsEnvironmentConfig.model_validate({"tools": ["calculator", "python"], "cpu_s": 20, "wall_s": 60})

    async def main() -> list[EnvStep | Failure]:
        environment = ToolsEnvironment("tools", section)
        try:
            conversations = [(Message("user", "?"), Message("assistant", text)) for text in texts]
            return list(await environment.step(conversations, [state] * len(texts)))
        finally:
            await environment.close()

    return asyncio.run(main())


def test_tool_results_come_back_and_the_conversation_goes_on() -> None:
    results = step_once(
        [
            'I compute.<tool>{"name": "calculator", "arguments": {"expression": "2 ** 10"}}</tool>',
            '<tool>{"name": "python", "arguments": {"code": "print(2 ** 10)"}}</tool>',
        ]
    )
    observation = (Message("user", "<result>\n1024\n</result>"),)
    assert results == [EnvStep(observation, rewards={"tools": 0.0}, done=False, state=STATE)] * 2


@pytest.mark.parametrize(
    ("text", "reward", "answer"),
    [
        ("so <answer> 1024 </answer>", 1.0, "1024"),
        ("<answer>1025</answer>", 0.0, "1025"),
        ("I do not know", 0.0, None),
        ('<tool>{"name": "calculator"', 0.0, None),
    ],
)
def test_answer_or_a_turn_without_a_tag_ends_the_conversation(text: str, reward: float, answer: str | None) -> None:
    assert step_once([text]) == [EnvStep(rewards={"tools": reward}, state=STATE, answer=answer)]


def test_first_tag_counts_where_a_response_makes_up_the_result() -> None:
    call = '<tool>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool>'
    (step,) = step_once([f"{call}<result>5</result><answer>1024</answer>"])
    assert isinstance(step, EnvStep)
    assert not step.done
    assert step.observation[0].content == "<result>\n2\n</result>"


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("calculator 1 + 1", "the call is not JSON"),
        ('{"name": "calculator"}', "no name and arguments"),
        ('{"name": "search", "arguments": {}}', "there is no tool 'search'; tools: calculator, python"),
        ('{"name": "python", "arguments": {"expression": "1"}}', "python takes one argument, 'code'"),
        ('{"name": "calculator", "arguments": {"expression": "1 / 0"}}', "division by zero"),
    ],
)
def test_call_that_fails_is_answered_with_what_was_wrong(call: str, problem: str) -> None:
    (step,) = step_once([f"<tool>{call}</tool>"])
    assert isinstance(step, EnvStep)
    assert not step.done
    assert step.observation[0].content.startswith("<result>\nerror: ")
    assert problem in step.observation[0].content


def test_state_without_an_answer_fails_its_item() -> None:
    (result,) = step_once(["<answer>1</answer>"], {})
    assert isinstance(result, Failure)


def test_numbers_compare_by_value_and_text_without_case() -> None:
    assert answers_match("$1,000.0", "1000")
    assert answers_match("0.3333333", "0.33333333")
    assert not answers_match("0.33", "0.3333333")
    assert answers_match(" Paris", "paris ")
    assert not answers_match("Paris", "7")


def test_prompt_shows_how_each_tool_is_called() -> None:
    assert '<tool>{"name": "calculator"' in tools_prompt(["calculator"])
    assert "python" not in tools_prompt(["calculator"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4)", "14"),
        ("7 / 2", "3.5"),
        ("7 // 2 - -1", "4"),
        ("2^10", "1024"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("gcd(12, 18) * round(2.6)", "18"),
        ("round(3.14159, 2)", "3.14"),
        ("2 * pi", "6.28318530718"),
        ("9 ** 99", str(9**99)),
        (" 0.1 + 0.2 ", "0.3"),
        ("-" * 101 + "1", "-1"),
    ],
)
def test_value_of_an_expression(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("10 ** 1000 * 10 ** 1000", "too large"),
        ("1e308 * 10", "too large"),
        ("exp(1000)", "range"),
        ("round(5, -1000000000)", "at most 15 digits"),
        ("1 / 0", "division by zero"),
        ("(-8) ** 0.5", "complex"),
        ("__import__('os')", "not arithmetic"),
        ("().__class__", "not arithmetic"),
        ("[1] * 10", "not arithmetic"),
        ("'a' * 10", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("x + 1", "not arithmetic"),
        ("sqrt()", "argument"),
        ("sqrt(-1)", "math domain error|nonnegative"),
        ("1 +", "not an expression"),
        ("", "not an expression"),
        ("1" * 501, "longer than 500"),
        ("(" * 400, "too many nested|not an expression"),
    ],
)
def test_what_is_refused_raises_value_error(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        calculate(expression)


DEEP_DIRECTORIES = (
    '{"name": "python", "arguments": {"code": "import os\\nfor _ in range(3000): os.mkdir(\'d\'); os.chdir(\'d\')"}}'
)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("[" * 1000, "error: the call is"),
        ("[" * 100_000, "error: the call is nested too deeply"),
        ('{"a":' * 20_000, "error: the call is nested too deeply"),
        ('{"name": "calculator", "arguments": {"expression": "' + "(" * 240 + "1" + ")" * 240 + '"}}', "error: "),
        ('{"name": "calculator", "arguments": {"expression": "' + "-" * 490 + '1"}}', ""),
        ('{"name": ' + "1" * 5000 + "}", "error: the call is not JSON"),
        (DEEP_DIRECTORIES, ""),
    ],
)
def test_hostile_response_leaves_its_neighbours_alone(call: str, result: str) -> None:
    hostile, neighbour = step_once([f"<tool>{call}</tool>", "<answer>1024</answer>"])
    assert isinstance(hostile, EnvStep)
    assert hostile.observation[0].content.startswith(f"<result>\n{result}")
    assert neighbour == EnvStep(rewards={"tools": 1.0}, state=STATE, answer="1024")


def test_item_without_its_state_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **limits: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr("nemo_rl.environments.tools.run_python", broken)
    call = '<tool>{"name": "python", "arguments": {"code": "1"}}</tool>'
    failed, neighbour = step_once([call, "<answer>1024</answer>"])
    assert failed == Failure(FailureClass.ENVIRONMENT, "OSError: no space left on device")
    assert isinstance(neighbour, EnvStep)
