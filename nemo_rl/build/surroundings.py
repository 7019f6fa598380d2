"""What rollouts meet beside an engine: environments and scorers, agents and NeMo Gym behind the gateway."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl.build.agents import agent_runtimes, make_agents, make_codec, open_gateway
from nemo_rl.build.environments import open_environments
from nemo_rl.build.nemo_gym import gym_configs, open_nemo_gym
from nemo_rl.build.scorers import open_scorers
from nemo_rl.config.layout import Layout
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.datasets import PromptSet
from nemo_rl.experience.rollouts import RolloutContext
from nemo_rl.experience.scoring import Scoring
from nemo_rl.gateway.codec import Codec
from nemo_rl.interfaces import Agent, Environment


@dataclass(frozen=True, slots=True)
class RolloutDependencies:
    environments: Mapping[str, Environment]
    scoring: Scoring
    agents: Mapping[str, Agent]
    codec: Codec | None  # of the gateway; None: nobody talks to it


async def open_rollout_dependencies(
    config: RolloutRunConfig, encoder: ChatEncoder, layout: Layout | None, stack: AsyncExitStack
) -> RolloutDependencies:
    """What needs no engine, closed with `stack`; raises ConfigError. `layout` is None where no policy runs beside."""
    environments = open_environments(config, stack)
    scoring = await open_scorers(config, layout, stack)
    agents = make_agents(config)
    codec = make_codec(config, encoder) if agents or gym_configs(config) else None
    return RolloutDependencies(environments, scoring, agents, codec)


async def attach_agents(
    context: RolloutContext,
    dependencies: RolloutDependencies,
    config: RolloutRunConfig,
    *,
    prompt_sets: Sequence[PromptSet],
    gym_dir: Path,
    stack: AsyncExitStack,
) -> RolloutContext:
    """The context with agents and NeMo Gym, behind a gateway to its engine; unchanged where there are none."""
    if dependencies.codec is None:
        return context
    manager = await open_gateway(config, dependencies.codec, context.generation, stack)
    gyms = await open_nemo_gym(config, prompt_sets, manager, gym_dir, stack)
    return replace(context, agents=agent_runtimes(config, dependencies.agents, manager), gyms=gyms)
