"""Components that a rollout calls besides the engine: environments, scorers and agents, opened from their sections."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.layout import Device, Layout
from nemo_rl.config.layout_planner import make_reward_model_layout
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.scorers.make_scorer import make_scorer
from nemo_rl.errors import ConfigError
from nemo_rl.experience.agent_runtime import AgentRuntime
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits
from nemo_rl.experience.scoring import Scoring, ScoringTurn, WeightedScorer
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.server import check_gateway
from nemo_rl.interfaces import Agent, Generation
from nemo_rl.launch.starting_adapters import adapter_versions

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import ReservedSlot

from nemo_rl.launch.agent_layer import (
    agent_runtimes,
    make_agents,
    make_codec,
    open_gateway,
    open_nemo_gym,
)


def open_environments(config: RolloutRunConfig, stack: AsyncExitStack) -> dict[str, CheckedEnvironment]:
    """Open the environments of `env` by task name; `stack` closes them. Raises ConfigError for one that cannot be found
    or made."""
    environments: dict[str, CheckedEnvironment] = {}
    for name, section in config.env.items():
        if name not in config.runner_sections:
            environments[name] = make_environment(name, section)
            stack.push_async_callback(environments[name].close)
    return environments


async def open_scorers(
    config: RolloutRunConfig, stack: AsyncExitStack, *, layout: Layout | None = None, device: Device | None = None
) -> Scoring:
    """Make every scorer once and assign each task its own; `stack` closes them. Raises ConfigError.

    `layout` is that of the run, None if no policy trains beside the scorers; then `device` is that of the run's engine,
    None if there is none.
    """
    slots = await _reserve_pool(config, layout, stack) if config.reward_model.enable_resource_pool else ()
    scorers: dict[str, WeightedScorer] = {}
    for name, section in config.scorers.items():
        scorer = make_scorer(name, section, device=layout.device if layout else device, slots=slots)
        stack.push_async_callback(scorer.close)
        scorers[name] = WeightedScorer(name, scorer, section.weight)
    return Scoring({task: tuple(scorers[name] for name in section.scorers) for task, section in config.env.items()})


async def _reserve_pool(
    config: RolloutRunConfig, layout: Layout | None, stack: AsyncExitStack
) -> "Sequence[ReservedSlot]":
    """Reserve one device slot per GPU of the reward models' pool; on a CPU one per process."""
    from nemo_rl.distributed.cluster import cluster_address, connect, reserve  # loads Ray

    if layout is not None and layout.device == "cuda" and not layout.needs_cluster:
        problem = "Ray cannot divide the policy's GPU; set cluster.address, or place the policy on several ranks"
        raise ConfigError("reward_model.enable_resource_pool", True, problem)
    connect(config.cluster.address, env_vars=config.cluster.environment)
    pool = make_reward_model_layout(config.reward_model, "cpu" if layout is None else layout.device)
    reservation = await reserve(
        pool,
        timeout_s=config.cluster.placement_limit_s,
        may_grow=cluster_address(config.cluster.address) is not None,
        keys="reward_model.nnodes, reward_model.n_gpus_per_node",
    )
    stack.callback(reservation.release)
    return [reservation.slot(device_slot) for device_slot in pool.engines]


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """The parts of the rollout layer that need no engine."""

    encoder: ChatEncoder
    environments: Mapping[str, CheckedEnvironment]
    scoring: Scoring
    agents: Mapping[str, Agent]
    codec: Codec | None  # the gateway's codec; None without agents


async def open_rollout_parts(
    config: RolloutRunConfig,
    encoder: ChatEncoder,
    stack: AsyncExitStack,
    *,
    layout: Layout | None = None,
    device: Device | None = None,
) -> RolloutParts:
    """Open environments, scorers and agents, to be closed with `stack`; raises ConfigError.

    `layout` and `device` are those of `open_scorers`.
    """
    environments = open_environments(config, stack)
    scoring = await open_scorers(config, stack, layout=layout, device=device)
    agents = make_agents(config)
    codec = make_codec(config, encoder) if config.runner_sections else None
    if codec is not None:
        check_gateway(config.gateway)
    return RolloutParts(encoder, environments, scoring, agents, codec)


async def open_rollout_dependencies(
    config: RolloutRunConfig,
    parts: RolloutParts,
    generation: Generation,
    *,
    limits: RolloutLimits,
    prompt_sets: Sequence[PromptSet],
    gym_dir: Path,
    stack: AsyncExitStack,
    scoring_turn: ScoringTurn | None = None,
) -> RolloutDependencies:
    """Open what needs the engine, the gateway and NeMo Gym, beside `parts`; `stack` closes it. Raises ConfigError."""
    agents: dict[str, AgentRuntime] = {}
    gyms: dict[str, GymRuntime] = {}
    if parts.codec is not None:
        manager = await open_gateway(config, parts.codec, generation, stack)
        gyms = await open_nemo_gym(config, prompt_sets, manager, gym_dir, stack)
        agents = agent_runtimes(config, parts.agents, manager)
    scoring = Scoring(parts.scoring.by_task, turn=scoring_turn)
    truncated_rewards = {
        name: section.truncated_reward for name, section in config.env.items() if section.has_own_rewards
    }
    return RolloutDependencies(
        generation,
        parts.environments,
        parts.encoder,
        limits,
        agents,
        gyms,
        scoring,
        truncated_rewards,
        config.speakers,
        adapter_versions(config) if isinstance(config, SampledRunConfig) else {},
    )
