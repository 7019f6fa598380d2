"""`env`: environments by task name.

An entry's `type` is a built-in name or a dotted path; None: the entry's own name.
"""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.nemo_gym import NemoGymConfig


class MathEnvironmentConfig(EnvironmentConfig):
    """Answers compared as mathematics."""

    num_workers: int = Field(default=2, gt=0)  # processes
    verify_timeout_s: float = Field(default=10.0, gt=0)  # of one answer


class ReasoningGymEnvironmentConfig(EnvironmentConfig):
    """Answers scored by reasoning_gym's own verifiers; the prompt's state names the task."""

    num_workers: int = Field(default=0, ge=0)  # processes; 0: a thread
    partial_credit: bool = False  # False: 1 for a full score, else 0
    require_stop: bool = False  # an answer cut by its token limit scores 0


class SlidingPuzzleEnvironmentConfig(EnvironmentConfig):
    """A game of several turns: slide tiles until they are in order."""

    move_reward: float = 0.0
    invalid_move_penalty: float = 0.0


class ToolsEnvironmentConfig(EnvironmentConfig):
    """A calculator and Python in a sandbox, then the final answer."""

    tools: list[Literal["calculator", "python"]] = Field(default_factory=lambda: ["calculator"])
    num_workers: int = Field(default=2, gt=0)  # tool processes at once
    cpu_s: float = Field(default=2.0, gt=0)
    wall_s: float = Field(default=5.0, gt=0)
    memory_bytes: int = Field(default=512 * 1024 * 1024, gt=0)
    max_output_chars: int = Field(default=4096, gt=0)


class AgentConfig(EnvironmentConfig):
    """An agent that owns its loop: exactly one of `function` and `command`. Its reward is what it returns or posts, or
    what the environment `scored_by` gives to its last conversation. `timeout_s` bounds one run."""

    function: str | None = None  # a dotted path: (prompt, base_url, api_key) -> reward, rewards by name, or AgentResult
    command: list[str] | None = None  # run with OPENAI_BASE_URL, OPENAI_API_KEY and the prompt as JSON in its input
    scored_by: str | None = None  # another entry of `env`
    max_concurrency: int = Field(default=64, gt=0)  # runs at once
    in_tasks: bool = False  # function: each run in a Ray task, a process of its own


class RewardModelEnvironmentConfig(EnvironmentConfig):
    """One turn whose rewards are those of its `scorers` alone."""


class CustomEnvironmentConfig(EnvironmentConfig):
    """A class or a function by dotted path, with the arguments it is made with."""

    kwargs: dict[str, Any] = Field(default_factory=dict)


ENVIRONMENT_CONFIGS: dict[str, type[EnvironmentConfig]] = {
    "math": MathEnvironmentConfig,
    "reasoning_gym": ReasoningGymEnvironmentConfig,
    "sliding_puzzle": SlidingPuzzleEnvironmentConfig,
    "tools": ToolsEnvironmentConfig,
    "agent": AgentConfig,
    "nemo_gym": NemoGymConfig,
    "reward_model": RewardModelEnvironmentConfig,
}
