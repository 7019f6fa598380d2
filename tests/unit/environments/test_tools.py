"""Tool calls in text, their results, the final answer, and the calculator."""

import asyncio
from typing import Any

import pytest

from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.tools import ToolsEnvironment, ToolsEnvironmentConfig, answers_match, tools_prompt
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


DEEP_DIRECTORIES = (
    '{"name": "python", "arguments": {"code": "import os\\nfor _ in range(3000): os.mkdir(\'d\'); os.chdir(\'d\')"}}'
)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("[" * 1000, "error: the call is"),
        ('{"name": "\\ud800", "arguments": {}}', "error: there is no tool"),
        ('{"name": "calculator", "arguments": {"expression": "\\ud800"}}', "error: "),
        ('{"name": "python", "arguments": {"code": "\\ud800"}}', ""),
        ('{"name": "python", "arguments": {"code": "\\u0000"}}', ""),
        ('{"name": "python", "arguments": {"code": "# ' + "a" * 10_000_000 + '"}}', ""),
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


def test_call_that_breaks_its_tool_is_an_error_text_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(expression: str) -> str:
        raise KeyError(expression)

    monkeypatch.setattr("nemo_rl.environments.tools.calculate", broken)
    (step,) = step_once(['<tool>{"name": "calculator", "arguments": {"expression": "1"}}</tool>'])
    observation = (Message("user", "<result>\nerror: KeyError: '1'\n</result>"),)
    expected = EnvStep(observation, {"tools": 0.0}, done=False, state=STATE, response_fault="broken_tool")
    assert step == expected


def test_calls_that_each_have_a_deadline_share_none() -> None:
    assert make_environment("tools", ToolsEnvironmentConfig(timeout_s=0.001)).bounds_items


def test_item_without_its_state_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **limits: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr("nemo_rl.environments.tools.run_python", broken)
    call = '<tool>{"name": "python", "arguments": {"code": "1"}}</tool>'
    failed, neighbour = step_once([call, "<answer>1024</answer>"])
    assert failed == Failure(FailureClass.ENVIRONMENT, "OSError: no space left on device")
    assert isinstance(neighbour, EnvStep)
