"""An agent with the gateway's sessions and the limits of its rollouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from nemo_rl.config.environment import AgentRunnerConfig, RolloutRunnerConfig
from nemo_rl.config.kinds import import_path
from nemo_rl.environments.harness import HarnessConfig, find_program
from nemo_rl.errors import ConfigError
from nemo_rl.experience.agents import AgentConfig
from nemo_rl.experience.command_agent import CommandAgent, HarnessAgent
from nemo_rl.experience.function_agent import FunctionAgent, IsolatedFunctionAgent
from nemo_rl.gateway.side_calls import SideCallTest, make_side_call_test
from nemo_rl.interfaces import Agent
from nemo_rl.types import SamplingParams

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray

TrajectorySelection: TypeAlias = Literal["all", "longest"]  # which histories are trained on


class SessionProvider(Protocol):
    """The part of the gateway that agents' rollouts need; `gateway.manager.GatewayManager` implements it."""

    def open_session(
        self,
        *,
        seed: int,
        sampling: SamplingParams | None = None,
        server: int | None = None,
        trains: bool = True,
        is_side_call: SideCallTest | None = None,
    ) -> "SessionHandle": ...

    def reward_calls(self, handle: "SessionHandle", rewards: Mapping[str, Mapping[str, float]]) -> None:
        """Store rewards by name for the chains through each completion id; raises RequestError for an unknown id."""
        ...

    async def finish(self, handle: "SessionHandle") -> "FinishedSession": ...

    async def abandon(self, handle: "SessionHandle") -> None:
        """Close the session and forget what it holds; nothing if it has ended already."""
        ...


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The rewards that a rollout may have: each of them and their sum are within `low` and `high`."""

    key: str = "env.<name>"  # the section's, for errors
    low: float = -100.0
    high: float = 100.0

    @classmethod
    def of(cls, name: str, section: RolloutRunnerConfig) -> "RewardRange":
        """Return the range that the entry `env.<name>` allows."""
        return cls(f"env.{name}", section.reward_min, section.reward_max)

    def find_problem(self, rewards: Mapping[str, float]) -> str | None:
        """Return which of these finite numbers is out of range, or None."""
        limits = f"{self.key}.reward_min = {self.low:g} and {self.key}.reward_max = {self.high:g}"
        for name, reward in rewards.items():
            if not self.low <= reward <= self.high:
                return f"reward {name!r} is {reward!r}, not between {limits}"
        if rewards and not self.low <= (total := sum(rewards.values())) <= self.high:
            return f"the sum of {len(rewards)} rewards is {total!r}, not between {limits}"
        return None


@dataclass(frozen=True, slots=True)
class AgentRuntime:
    """An agent with its sessions and limits."""

    agent: Agent
    sessions: SessionProvider
    timeout_s: float  # deadline of one run
    max_concurrency: int  # runs at once
    scored_by: str | None = None  # the environment whose rewards count; None: those that the agent gives
    trajectory_selection: TrajectorySelection = "all"
    reward_range: RewardRange = field(default_factory=RewardRange)
    is_side_call: SideCallTest | None = None  # tells model calls that are not trained on
    is_harness: bool = False  # a program that cannot tell that a failed call ended its work
    ignored_rewards: set[str] = field(default_factory=set)  # names of rewards beside `scored_by`, logged once each


def make_agent_runtime(
    name: str,
    agent: Agent,
    section: RolloutRunnerConfig,
    sessions: SessionProvider,
    trajectory_selection: TrajectorySelection,
) -> AgentRuntime:
    """Return an agent made of `section` with the gateway's sessions and its limits."""
    assert isinstance(section, AgentRunnerConfig)
    return AgentRuntime(
        agent,
        sessions,
        timeout_s=section.timeout_s,
        max_concurrency=section.max_concurrency,
        scored_by=section.scored_by,
        trajectory_selection=trajectory_selection,
        reward_range=RewardRange.of(name, section),
        is_side_call=make_side_call_test(section.side_calls),
        is_harness=isinstance(section, HarnessConfig) and section.is_harness,
    )


def make_agent(name: str, section: AgentConfig) -> Agent:
    """Return the agent of the entry `env.<name>`.

    Raises ConfigError for a function that cannot be imported, and for a harness that is not installed.
    """
    if section.command is not None and section.is_harness:
        find_program(f"env.{name}", section.command)
        return HarnessAgent(section)
    if section.command is not None:
        fields = section.env_state_fields
        if fields is None and (section.scored_by is not None or section.scorers):
            fields = []
        return CommandAgent(
            name,
            section.command,
            variables=section.variables,
            inherited_variables=section.inherited_variables,
            env_state_fields=fields,
        )
    assert section.function is not None  # check_agent
    key = f"env.{name}.function"
    function = import_path(key, section.function)
    if not callable(function):
        raise ConfigError(key, section.function, "not a function")
    if section.in_tasks:
        return IsolatedFunctionAgent(name, section.function)
    return FunctionAgent(name, function, max_threads=section.max_concurrency)
