"""The environment `tools`: answer a question with a calculator, and Python in a sandbox.

A turn of the model is text, and its first complete tag counts:

- `<tool>{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}</tool>` or
  `<tool>{"name": "python", "arguments": {"code": "print(2 ** 10)"}}</tool>`: the next user message holds the output
  between `<result>` and `</result>`;
- `<answer>14</answer>`: ends the conversation and is compared with `state["answer"]`.

A turn with neither ends the conversation.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.value_types import Processes, Seconds
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import StepResult, step_each
from nemo_rl.environments.calculator import calculate
from nemo_rl.environments.response_tags import find_tags
from nemo_rl.environments.sandbox import SandboxLimits, isolation, run_python
from nemo_rl.errors import summarize_error
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

logger = logging.getLogger(__name__)

ARGUMENTS = {"calculator": "expression", "python": "code"}  # the argument of each tool
EXAMPLES = {
    "calculator": '{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}',
    "python": '{"name": "python", "arguments": {"code": "print(2 ** 10)"}}',
}
BROKEN_TOOL = "broken_tool"  # a response fault
RELATIVE_TOLERANCE = 1e-6  # tolerance of numeric answers


class ToolsEnvironmentConfig(EnvironmentConfig):
    """A calculator and Python in a sandbox, then the final answer."""

    # tools that the model may call
    tools: list[Literal["calculator", "python"]] = Field(default_factory=lambda: ["calculator"])
    num_workers: Processes = 2  # concurrent tool processes
    cpu_s: Seconds = 2.0  # CPU time of one call
    wall_s: Seconds = 5.0  # wall time of one call
    memory_bytes: int = Field(default=512 * 1024 * 1024, gt=0)  # memory per call
    max_output_chars: int = Field(default=4096, gt=0)  # per call; longer output is cut in the middle


class ToolsEnvironment:
    """Several turns; reward `tools` is 1 for the right final answer, else 0.

    Text compares case-insensitively without surrounding spaces, numbers by value. A call that cannot be parsed, or
    fails, is answered with an error message, and the conversation continues; one that breaks its tool is counted, too.
    """

    bounds_items = True

    def __init__(self, name: str, section: ToolsEnvironmentConfig) -> None:
        limits = SandboxLimits(section.cpu_s, section.wall_s, section.memory_bytes, section.max_output_chars)
        known: dict[str, Callable[[str], str]] = {
            "calculator": calculate,
            "python": partial(run_python, limits=limits),
        }
        self._tools = {tool: known[tool] for tool in section.tools}
        if "python" in self._tools:
            isolation()  # logs what the sandbox covers on this machine
        self._blocking_calls = BlockingCalls(f"env-{name}", section.num_workers)
        self._timeout_s = section.timeout_s

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._step_one, conversations, states)

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        if "answer" not in state:
            return Failure(FailureClass.REWARD, "the prompt's env_state has no 'answer'")
        tag = next(find_tags(conversation[-1].content, "tool", "answer"), None)
        if tag is None:
            return EnvStep(rewards={"tools": 0.0}, state=state)
        kind, text = tag
        if kind == "answer":
            reward = float(answers_match(text, str(state["answer"])))
            return EnvStep(rewards={"tools": reward}, state=state, answer=text.strip())
        output, fault = await self._blocking_calls.run(partial(self._call, text), timeout_s=self._timeout_s)
        observation = Message("user", f"<result>\n{output}\n</result>")
        return EnvStep((observation,), rewards={"tools": 0.0}, done=False, state=state, response_fault=fault)

    def _call(self, text: str) -> tuple[str, str | None]:
        """Return the output, and the response fault of a call that breaks its tool; raises OSError of the sandbox."""
        try:
            name, argument = parse_call(text, self._tools)
            return self._tools[name](argument), None
        except ValueError as error:
            return f"error: {error}", None
        except (RecursionError, MemoryError):  # thousands of brackets, in JSON or in an expression
            return "error: the call is nested too deeply", BROKEN_TOOL
        except OSError:  # no process, memory or disk: the machine's
            raise
        except Exception as error:  # the call has found a defect of the tool
            logger.warning("a call broke its tool: %.200s", text, exc_info=error)
            return f"error: {summarize_error(error)}", BROKEN_TOOL

    async def close(self) -> None:
        """Do nothing: no resources are held."""


TOOLS = Entry(ToolsEnvironmentConfig, make=ToolsEnvironment)


def tools_prompt(tools: Sequence[str]) -> str:
    """Return a system prompt that explains the tags and these tools."""
    lines = "\n".join(f"<tool>{EXAMPLES[tool]}</tool>" for tool in tools)
    return (
        "Solve the task. You may call a tool, one a message:\n"
        f"{lines}\n"
        "Its output comes back in <result> tags. When you know the answer, write <answer>the answer</answer>."
    )


def parse_call(text: str, known: Mapping[str, object]) -> tuple[str, str]:
    """Return a tool's name and its one argument; raises ValueError with a message for the model."""
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


def answers_match(answer: str, reference: str) -> bool:
    """Return whether two answers are the same number, or else the same text."""
    numbers = _parse_number(answer), _parse_number(reference)
    if numbers[0] is not None and numbers[1] is not None:
        return abs(numbers[0] - numbers[1]) <= RELATIVE_TOLERANCE * abs(numbers[1])
    return answer.strip().casefold() == reference.strip().casefold()


def _parse_number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace("$", "").strip())
    except ValueError:
        return None
