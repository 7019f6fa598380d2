"""Agents of a run, the gateway that serves them, and NeMo Gym stacks."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.config.collect import POLICY as MODEL_NAME
from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.data.prompts import Blend
from nemo_rl.environments.nemo_gym.entry import ServedPolicy
from nemo_rl.errors import ConfigError
from nemo_rl.experience.agent_runtime import AgentRuntime, RewardRange, make_agent_runtime
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.interfaces import Agent, Generation
from nemo_rl.launch.sampling import make_sampling
from nemo_rl.launch.starting_adapters import adapter_versions
from nemo_rl.types import BASE_VERSION

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import GatewayManager

CALLS_PER_RUN = 16  # concurrent calls per agent run, on average; calls beyond that wait


def make_agents(config: RolloutRunConfig) -> dict[str, Agent]:
    """Return the agents of `env` by name; raises ConfigError for a function that cannot be imported."""
    return {
        name: ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type").make(name, section)
        for name, section in config.runner_sections.items()
        if not section.has_stack
    }


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
    """Start the gateway; `stack` closes it. Any model name means the policy, unless the engine holds named adapters."""
    from nemo_rl.gateway.manager import GatewayManager  # loads Ray

    max_concurrency = sum(section.max_concurrency for section in config.runner_sections.values())
    rules = CompletionRules(
        MODEL_NAME,
        max_model_len=config.policy.max_total_sequence_length,
        sampling=make_sampling(config, codec.encoder.stop_token_ids),
        seed=config.seed,
        max_concurrent_calls=CALLS_PER_RUN * max_concurrency,
        timeout_s=config.generation_timeout_s,
        answers_full_context=config.gateway.full_context == "length",
        hides_unused_tools=config.gateway.tool_choice_none == "hidden",
        max_queued_calls=config.gateway.max_queued_calls,
        queue_timeout_s=config.gateway.queue_timeout_s,
        can_guide=config.policy.generation.CAN_GUIDE,
        guided_calls=config.gateway.guided_calls,
        forced_tool_choice=config.gateway.forced_tool_choice,
        **_named_models(config),
    )
    manager = await GatewayManager.start(generation, codec, rules, config.gateway)
    stack.push_async_callback(manager.close)
    return manager


def _named_models(config: RolloutRunConfig) -> dict[str, Any]:
    """Return the rules of a gateway whose engine holds adapters: names for the sampled one, versions of the others."""
    if not isinstance(config, SampledRunConfig) or not config.server.adapters:
        return {}
    versions = {config.policy.model_name: BASE_VERSION} | adapter_versions(config)
    sampled = str(config.server.model)
    return {
        "aliases": (sampled,),
        "others": {name: version for name, version in versions.items() if name != sampled},
    }


def agent_runtimes(
    config: RolloutRunConfig, agents: Mapping[str, Agent], manager: "GatewayManager"
) -> dict[str, AgentRuntime]:
    """Return every agent together with the gateway's sessions and its limits."""
    sections, selection = config.runner_sections, config.rollout.trajectory_selection
    return {name: make_agent_runtime(name, agent, sections[name], manager, selection) for name, agent in agents.items()}


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
    sections = {name: section for name, section in config.runner_sections.items() if section.has_stack}
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
            reward_range=RewardRange.of(name, section),
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
