"""Agents and the gateway that they talk to, from the configuration."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from nemo_rl.build.rollouts import make_sampling
from nemo_rl.config.env import AgentConfig
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.nemo_gym import NemoGymConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.registry import import_path
from nemo_rl.errors import ConfigError
from nemo_rl.experience.agent_process import CommandAgent
from nemo_rl.experience.agents import AgentRuntime, FunctionAgent, TaskAgent
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.interfaces import Agent, Generation

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import GatewayManager

CALLS_PER_RUN = 16  # at once, of all runs on average; above it calls are answered 429
MODEL_NAME = "policy"  # as agents see it; any other name they ask for is served too


def make_agents(config: RolloutRunConfig) -> dict[str, Agent]:
    """The agents of `env` by name; raises ConfigError for a function that cannot be found."""
    return {name: make_agent(name, section) for name, section in agent_configs(config).items()}


def agent_configs(config: RolloutRunConfig) -> dict[str, AgentConfig]:
    return {name: section for name, section in config.env.items() if isinstance(section, AgentConfig)}


def make_agent(name: str, section: AgentConfig) -> Agent:
    if section.command is not None:
        return CommandAgent(name, section.command)
    assert section.function is not None  # config/agent_checks.py
    key = f"env.{name}.function"
    function = import_path(key, section.function)
    if not callable(function):
        raise ConfigError(key, section.function, "not a function")
    if section.in_tasks:
        return TaskAgent(name, section.function)
    return FunctionAgent(name, function, max_threads=section.max_concurrency)


def make_codec(config: RolloutRunConfig, encoder: ChatEncoder) -> Codec:
    """Raises ConfigError for unknown parsers, and for a chat template that cannot render the answers of tools."""
    gateway = config.gateway
    codec = Codec(encoder, tool_parser_name=gateway.tool_parser, reasoning_parser_name=gateway.reasoning_parser)
    roles = ("user",) if gateway.tool_parser is None else ("user", "tool")
    try:
        encoder.check(roles)
    except ConfigError as error:
        hint = f"{error.problem} (for agents without tools: gateway.tool_parser=null)"
        raise ConfigError(error.key, error.value, hint) from error
    return codec


async def open_gateway(
    config: RolloutRunConfig, codec: Codec, generation: Generation, stack: AsyncExitStack
) -> "GatewayManager":
    """Start the gateway, closed with `stack`."""
    from nemo_rl.gateway.manager import GatewayManager  # loads Ray

    runners = (section for section in config.env.values() if isinstance(section, AgentConfig | NemoGymConfig))
    rules = CompletionRules(
        MODEL_NAME,
        max_model_len=config.policy.max_total_sequence_length,
        sampling=make_sampling(config, codec.encoder.stop_token_ids),
        seed=config.seed,
        max_concurrent_calls=CALLS_PER_RUN * sum(section.max_concurrency for section in runners),
        timeout_s=config.policy.generation.timeout_s,
    )
    manager = await GatewayManager.start(generation, codec, rules, config.gateway)
    stack.push_async_callback(manager.close)
    return manager


def agent_runtimes(
    config: RolloutRunConfig, agents: Mapping[str, Agent], manager: "GatewayManager"
) -> dict[str, AgentRuntime]:
    """Every agent with the gateway's sessions."""
    sections = agent_configs(config)
    return {
        name: AgentRuntime(
            agent,
            manager,
            timeout_s=sections[name].timeout_s,
            max_concurrency=sections[name].max_concurrency,
            scored_by=sections[name].scored_by,
            trajectory_selection=config.rollout.trajectory_selection,
        )
        for name, agent in agents.items()
    }
