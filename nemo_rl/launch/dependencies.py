"""The dependencies of rollouts besides an engine: environments, scorers, agents and NeMo Gym stacks, opened from the
configuration and closed in reverse order."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.config.environment import RolloutRunnerConfig
from nemo_rl.config.layout import Layout, make_reward_model_layout
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.data.blend import Blend
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.datasets import PromptSet
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig, ServedPolicy
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.scorers.registry import make_scorer
from nemo_rl.errors import ConfigError
from nemo_rl.experience.agents import AgentConfig, AgentRuntime
from nemo_rl.experience.nemo_gym_rollouts import GymRuntime
from nemo_rl.experience.rollouts import RolloutDependencies, RolloutLimits
from nemo_rl.experience.scoring import Scoring, ScoringTurn, WeightedScorer
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.interfaces import Agent, Generation
from nemo_rl.launch.rollouts import make_sampling

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import ReservedSlot
    from nemo_rl.gateway.manager import GatewayManager

CALLS_PER_RUN = 16  # concurrent calls per agent run, on average; calls beyond that are answered with 429
MODEL_NAME = "policy"  # the name that agents see; any other model name is served too


def make_agents(config: RolloutRunConfig) -> dict[str, Agent]:
    """Return the agents of `env` by name; raises ConfigError for a function that cannot be imported."""
    return {
        name: ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type").make(name, section)
        for name, section in agent_configs(config).items()
    }


def agent_configs(config: RolloutRunConfig) -> dict[str, AgentConfig]:
    return {name: section for name, section in config.env.items() if isinstance(section, AgentConfig)}


def make_codec(config: RolloutRunConfig, encoder: ChatEncoder) -> Codec:
    """Return the gateway's codec; raises ConfigError for unknown parsers and for a chat template that cannot render
    tool results."""
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
    """Start the gateway; `stack` closes it."""
    from nemo_rl.gateway.manager import GatewayManager  # loads Ray

    runners = (section for section in config.env.values() if isinstance(section, RolloutRunnerConfig))
    rules = CompletionRules(
        MODEL_NAME,
        max_model_len=config.policy.max_total_sequence_length,
        sampling=make_sampling(config, codec.encoder.stop_token_ids),
        seed=config.seed,
        max_concurrent_calls=CALLS_PER_RUN * sum(section.max_concurrency for section in runners),
        timeout_s=config.generation_timeout_s,
    )
    manager = await GatewayManager.start(generation, codec, rules, config.gateway)
    stack.push_async_callback(manager.close)
    return manager


def agent_runtimes(
    config: RolloutRunConfig, agents: Mapping[str, Agent], manager: "GatewayManager"
) -> dict[str, AgentRuntime]:
    """Return every agent together with the gateway's sessions and its limits."""
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


def open_environments(config: RolloutRunConfig, stack: AsyncExitStack) -> dict[str, CheckedEnvironment]:
    """Open the environments of `env` by task name; `stack` closes them. Raises ConfigError for one that cannot be found
    or made."""
    environments: dict[str, CheckedEnvironment] = {}
    for name, section in config.env.items():
        if not isinstance(section, RolloutRunnerConfig):
            environments[name] = make_environment(name, section)
            stack.push_async_callback(environments[name].close)
    return environments


def gym_configs(config: RolloutRunConfig) -> dict[str, NemoGymConfig]:
    return {name: section for name, section in config.env.items() if isinstance(section, NemoGymConfig)}


async def open_nemo_gym(
    config: RolloutRunConfig,
    prompt_sets: Sequence[PromptSet],
    manager: "GatewayManager",
    run_dir: Path,
    stack: AsyncExitStack,
) -> dict[str, GymRuntime]:
    """Connect to or start each NeMo Gym stack with all agents that rows of `prompt_sets` name; `stack` closes them.

    Raises ConfigError for an agent that a stack does not have, GymUnavailable for what does not answer in time.
    """
    sections = gym_configs(config)
    policy = ServedPolicy(manager.default_base_url, manager.api_key, MODEL_NAME)
    runtimes = {}
    for name, section in sections.items():
        client = await ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type").make(
            name,
            section,
            agents=agent_names_for(name, prompt_sets),
            policy=policy,
            run_dir=run_dir if len(sections) == 1 else run_dir / name,
            stack=stack,
        )
        runtimes[name] = GymRuntime(
            client,
            manager,
            max_concurrency=section.max_concurrency,
            trajectory_selection=config.rollout.trajectory_selection,
        )
    return runtimes


def agent_names_for(name: str, prompt_sets: Iterable[PromptSet]) -> frozenset[str]:
    """Return the NeMo Gym agents that the rows of one entry of `env` name."""
    found: set[str] = set()
    for prompts in (prompt_set.prompts for prompt_set in prompt_sets):
        if isinstance(prompts, Blend):
            found.update(*(part.agent_names for part in prompts.parts if name in part.task_names))
        else:
            found.update(prompt.agent_name for prompt in prompts if prompt.task_name == name)
    return frozenset(found)


async def open_scorers(config: RolloutRunConfig, layout: Layout | None, stack: AsyncExitStack) -> Scoring:
    """Make every scorer once and assign each task its own; `stack` closes them. Raises ConfigError.

    `layout` is that of the run; None where no policy trains beside the scorers.
    """
    slots = await _reserve_pool(config, layout, stack) if config.reward_model.enable_resource_pool else ()
    scorers: dict[str, WeightedScorer] = {}
    for name, section in config.scorers.items():
        scorer = make_scorer(name, section, slots=slots)
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
    connect(config.cluster.address)
    pool = make_reward_model_layout(config.reward_model, "cpu" if layout is None else layout.device)
    reservation = await reserve(
        pool,
        timeout_s=config.cluster.start_timeout_s,
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
    codec: Codec | None  # of the gateway; None: there is no agent to serve


async def open_rollout_parts(
    config: RolloutRunConfig, encoder: ChatEncoder, layout: Layout | None, stack: AsyncExitStack
) -> RolloutParts:
    """Open environments, scorers and agents, to be closed with `stack`; raises ConfigError.

    `layout` is that of the policy; None where no policy runs.
    """
    environments = open_environments(config, stack)
    scoring = await open_scorers(config, layout, stack)
    agents = make_agents(config)
    codec = make_codec(config, encoder) if agents or gym_configs(config) else None
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
    """Open everything that needs no engine; `stack` closes it. `layout` is None where no policy trains beside. Raises
    ConfigError."""
    agents: dict[str, AgentRuntime] = {}
    gyms: dict[str, GymRuntime] = {}
    if parts.codec is not None:
        manager = await open_gateway(config, parts.codec, generation, stack)
        gyms = await open_nemo_gym(config, prompt_sets, manager, gym_dir, stack)
        agents = agent_runtimes(config, parts.agents, manager)
    scoring = Scoring(parts.scoring.by_task, turn=scoring_turn)
    return RolloutDependencies(generation, parts.environments, parts.encoder, limits, agents, gyms, scoring)
