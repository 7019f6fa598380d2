"""Answer a question with the help of tools: a calculator, and Python in a sandbox.

A turn of the model is text. Its first complete tag counts:

- `<tool>{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}</tool>` or
  `<tool>{"name": "python", "arguments": {"code": "print(2 ** 10)"}}</tool>`: the next message, from the user, holds the
  output between `<result>` and `</result>`;
- `<answer>14</answer>`: the end, compared with `state["answer"]`.

A turn with neither ends the conversation.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nemo_rl.config.env import ToolsEnvironmentConfig
from nemo_rl.environments.blocking import BlockingCalls
from nemo_rl.environments.calculator import calculate
from nemo_rl.environments.contract import StepResult
from nemo_rl.environments.registry import register
from nemo_rl.environments.sandbox import SandboxLimits, run_python
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

TAG = re.compile(r"<(tool|answer)>(.*?)</\1>", re.DOTALL)
RELATIVE_TOLERANCE = 1e-6  # of numbers
ARGUMENTS = {"calculator": "expression", "python": "code"}


@register("tools")
class ToolsEnvironment:
    """Several turns; reward `tools` is 1 for the right final answer, else 0.

    Text compares without case and outer spaces, numbers by value. A call that cannot be read, or fails, is answered
    with what was wrong, and the conversation goes on.
    """

    def __init__(self, name: str, section: ToolsEnvironmentConfig) -> None:
        limits = SandboxLimits(section.cpu_s, section.wall_s, section.memory_bytes, section.max_output_chars)
        known: dict[str, Callable[[str], str]] = {
            "calculator": calculate,
            "python": partial(run_python, limits=limits),
        }
        self._tools = {tool: known[tool] for tool in section.tools}
        self._blocking_calls = BlockingCalls(f"env-{name}", section.num_workers)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await asyncio.gather(*map(self._step_one, conversations, states))

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        if "answer" not in state:
            return Failure(FailureClass.REWARD, "the prompt's env_state has no 'answer'")
        tag = TAG.search(conversation[-1].content)
        if tag is None:
            return EnvStep(rewards={"tools": 0.0}, state=state)
        kind, text = tag.groups()
        if kind == "answer":
            reward = float(is_same_answer(text, str(state["answer"])))
            return EnvStep(rewards={"tools": reward}, state=state, answer=text.strip())
        output = await self._blocking_calls.run(partial(self._call, text))
        observation = Message("user", f"<result>\n{output}\n</result>")
        return EnvStep((observation,), rewards={"tools": 0.0}, done=False, state=state)

    def _call(self, text: str) -> str:
        try:
            name, argument = parse_call(text, self._tools)
            return self._tools[name](argument)
        except ValueError as error:
            return f"error: {error}"

    async def close(self) -> None:
        pass


def parse_call(text: str, known: Mapping[str, object]) -> tuple[str, str]:
    """A tool's name and its one argument; ValueError says what is wrong, in words for the model."""
    example = '{"name": "calculator", "arguments": {"expression": "1 + 2"}}'
    try:
        call = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the call is not JSON ({error}); example: {example}") from error
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        raise ValueError(f"the call has no name and arguments; example: {example}")
    name = call.get("name")
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"there is no tool {name!r}; tools: {', '.join(known)}")
    argument = call["arguments"].get(ARGUMENTS[name])
    if not isinstance(argument, str):
        raise ValueError(f"{name} takes one argument, {ARGUMENTS[name]!r}, a string")
    return name, argument


def is_same_answer(answer: str, reference: str) -> bool:
    numbers = _number(answer), _number(reference)
    if numbers[0] is not None and numbers[1] is not None:
        return abs(numbers[0] - numbers[1]) <= RELATIVE_TOLERANCE * abs(numbers[1])
    return answer.strip().casefold() == reference.strip().casefold()


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", "").strip())
    except ValueError:
        return None


def tools_prompt(tools: Sequence[str]) -> str:
    """A system prompt that explains the tags and these tools."""
    uses = {
        "calculator": '<tool>{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}</tool>',
        "python": '<tool>{"name": "python", "arguments": {"code": "print(2 ** 10)"}}</tool>',
    }
    lines = "\n".join(uses[tool] for tool in tools)
    return (
        "Solve the task. You may call a tool, one a message:\n"
        f"{lines}\n"
        "Its output comes back in <result> tags. When you know the answer, write <answer>the answer</answer>."
    )
