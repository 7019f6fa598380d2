"""The environment `tools`: answer a question with a calculator, and Python in a sandbox.

A turn of the model is text, and its first complete tag counts:

- `<tool>{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}</tool>` or
  `<tool>{"name": "python", "arguments": {"code": "print(2 ** 10)"}}</tool>`: the next user message holds the output
  between `<result>` and `</result>`;
- `<answer>14</answer>`: ends the conversation and is compared with `state["answer"]`.

A turn with neither ends the conversation.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import StepResult, step_each
from nemo_rl.environments.sandbox import SandboxLimits, isolation, run_python
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

TAG = re.compile(r"<(tool|answer)>(.*?)</\1>", re.DOTALL)
ARGUMENTS = {"calculator": "expression", "python": "code"}  # the argument of each tool
EXAMPLES = {
    "calculator": '{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}',
    "python": '{"name": "python", "arguments": {"code": "print(2 ** 10)"}}',
}
RELATIVE_TOLERANCE = 1e-6  # of numeric answers


class ToolsEnvironmentConfig(EnvironmentConfig):
    """A calculator and Python in a sandbox, then the final answer."""

    # that the model may call
    tools: list[Literal["calculator", "python"]] = Field(default_factory=lambda: ["calculator"])
    num_workers: int = Field(default=2, gt=0)  # concurrent tool processes
    cpu_s: float = Field(default=2.0, gt=0)  # CPU time of one call
    wall_s: float = Field(default=5.0, gt=0)  # wall time of one call
    memory_bytes: int = Field(default=512 * 1024 * 1024, gt=0)  # of one call's process
    max_output_chars: int = Field(default=4096, gt=0)  # of a call's output; the middle of a longer one is omitted


class ToolsEnvironment:
    """Several turns; reward `tools` is 1 for the right final answer, else 0.

    Text compares case-insensitively without surrounding spaces, numbers by value. A call that cannot be parsed, or
    fails, is answered with an error message, and the conversation continues.
    """

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

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._step_one, conversations, states)

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        if "answer" not in state:
            return Failure(FailureClass.REWARD, "the prompt's env_state has no 'answer'")
        tag = TAG.search(conversation[-1].content)
        if tag is None:
            return EnvStep(rewards={"tools": 0.0}, state=state)
        kind, text = tag.groups()
        if kind == "answer":
            reward = float(answers_match(text, str(state["answer"])))
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
        except (RecursionError, MemoryError):  # thousands of brackets, in JSON or in an expression
            return "error: the call is nested too deeply"

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


# The calculator: arithmetic whose size is bounded before it is computed.

Number: TypeAlias = int | float

MAX_CHARS = 500  # of an expression
MAX_BITS = 4096  # of an integer, 1233 digits
MAX_DIGITS = 15  # of a rounded number

CONSTANTS = {"pi": math.pi, "e": math.e}
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitXor: operator.pow,  # ^ is a power, as on paper
}


def round_number(value: Number, digits: int = 0) -> Number:
    """Return the rounded number; raises ValueError for more digits than MAX_DIGITS."""
    if abs(digits) > MAX_DIGITS:  # Python computes the power of ten, whatever its size
        raise ValueError(f"round to at most {MAX_DIGITS} digits")
    return round(value, digits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": round_number,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}


def calculate(expression: str) -> str:
    """Return the value as text: an integer in full, a float to 12 digits.

    Raises ValueError for an expression that is not arithmetic, has no value, or is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error.msg}") from error
    except (ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _check_bounds(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _evaluate_binary(op, _evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return _check_bounds(FUNCTIONS[name](*map(_evaluate, args)))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}; functions: {', '.join(FUNCTIONS)}")


def _evaluate_binary(op: ast.operator, left: Number, right: Number) -> Number:
    is_power = isinstance(op, ast.Pow | ast.BitXor)
    # The size is bounded before the power is computed.
    if is_power and isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise ValueError("the number is too large")
    return _check_bounds(OPERATORS[type(op)](left, right))


def _check_bounds(value: Number | complex) -> Number:
    if isinstance(value, complex):
        raise ValueError("the value is a complex number")
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("the number is too large")
    elif not math.isfinite(value):
        raise ValueError("the number is too large")
    return value
