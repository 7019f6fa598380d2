"""The environment `mcp` against a real MCP server in a process of its own."""

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl.environments.ecosystem.mcp import McpAgent, McpConfig
from nemo_rl.types import GenerationRequest, StopReason, Trajectory
from tests.unit.experience.test_agents import rollouts_of

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = [sys.executable, "-m", "tests.fakes.mcp_server"]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def rollout(*turns: str, count: int = 1, **keys: Any) -> tuple[Trajectory, ...]:
    """Rollouts of a policy that says these texts, one a turn."""
    section = McpConfig(**{"command": SERVER, "reward_tool": "reward", **keys})

    def say(request: GenerationRequest, text: str) -> str:
        return turns[text.count("<|im_start|>assistant") - 1]

    return rollouts_of(McpAgent("counter", section), count, say=say)


def results(trajectory: Trajectory) -> list[str]:
    """What the server told the policy."""
    return [m.message.content.strip() for m in trajectory.message_log if m.message.role == "tool"]


def test_calls_change_the_state_of_their_own_rollout_and_the_server_rewards_it() -> None:
    both = rollout(call("add", a=3, b=4) + call("add", a=-7), "it shows 0", count=2)
    for trajectory in both:
        assert trajectory.failure is None
        assert trajectory.rewards == {"counter": 1.5}  # the prompt's number is 0
        assert trajectory.answer == "it shows 0"
        assert trajectory.num_turns == 2
        assert results(trajectory) == ["7", "0"]


MISTAKES: list[tuple[str, str]] = [
    (call("subtract", a=1), "there is no tool 'subtract'; tools: add, spelling, fail, die"),
    (call("reward", answer="", number=1), "there is no tool 'reward'"),
    (call("add", a="many"), "error: "),
    (call("reward", answer="42", number=42, reward=1.0), "there is no tool 'reward'"),
    (call("fail"), "error: Error executing tool fail"),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES)
def test_a_mistake_of_the_policy_is_told_to_it(text: str, expected: str) -> None:
    (trajectory,) = rollout(text, "")
    assert expected in results(trajectory)[0]
    assert trajectory.rewards == {"counter": 1.0}


def test_a_rollout_ends_after_max_turns() -> None:
    (trajectory,) = rollout(*[call("add", a=1)] * 3, max_turns=2)
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.num_turns == 2


def test_a_call_that_breaks_the_server_of_its_rollout_is_a_wrong_answer() -> None:
    for run in (lambda: rollout(call("die")), lambda: rollout(call("hang"), call_timeout_s=1.0)):
        (trajectory,) = run()
        assert (trajectory.failure, trajectory.rewards) == (None, {"counter": 0.0})
        assert trajectory.response_faults == ("broken_tool",)


FAILURES: list[tuple[Callable[[], tuple[Trajectory, ...]], str]] = [
    (lambda: rollout("", reward_tool="reword"), "the server has no tool 'reword'"),
    (lambda: rollout("", reward_tool="fail"), "reward_tool 'fail'"),
    (lambda: rollout("", command=["no-such-program"]), "no-such-program"),
]


@pytest.mark.parametrize(("run", "cause"), FAILURES)
def test_a_server_that_fails_is_a_failure_of_the_rollout(run: Callable[[], tuple[Trajectory, ...]], cause: str) -> None:
    (trajectory,) = run()
    assert trajectory.failure is not None
    assert cause in trajectory.failure.cause
