"""The rollout layer of a run: its inputs (tokenizer, chat template, datasets), sampling and limits, the training source
and the validator; and its dependencies besides an engine: environments, scorers, agents and NeMo Gym stacks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.advantages import is_informative
from nemo_rl.algorithms.validation import Validator
from nemo_rl.config.environment import RolloutRunnerConfig
from nemo_rl.config.layout import Layout, make_reward_model_layout
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import ModelConfig
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.datasets import PromptSet, check_prompt_lengths, load_datasets
from nemo_rl.data.prompts import Blend, PromptLoader
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.environments.nemo_gym.entry import ServedPolicy
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.scorers.registry import make_scorer
from nemo_rl.errors import ConfigError
from nemo_rl.experience.agents import AgentRuntime, make_agent_runtime
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.nemo_gym_rollouts import GymRuntime
from nemo_rl.experience.records import RolloutWriter
from nemo_rl.experience.rollouts import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.scoring import Scoring, ScoringTurn, WeightedScorer
from nemo_rl.experience.sources import FilteredSource, RecordedResponseSource, SyncSource, prompts_per_batch
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.server import check_gateway
from nemo_rl.interfaces import Agent, Generation, GroupSource
from nemo_rl.policy.hf_model import load_config
from nemo_rl.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from nemo_rl.distributed.cluster import ReservedSlot
    from nemo_rl.gateway.manager import GatewayManager


@dataclass(frozen=True, slots=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    encoder: ChatEncoder
    train: PromptSet
    validation: tuple[PromptSet, ...]
    probes: tuple[tuple[int, ...], ...]  # prompts on which a refit is verified
    vocab_size: int = 0  # of the model, padding of its embedding included


def load_prompts(config: TrainingRunConfig) -> tuple[PromptSet, tuple[PromptSet, ...]]:
    """Load training and validation prompts, each with a configured environment; needs no model."""
    train, validation = load_datasets(config.data, config.seed)
    check_tasks(config, (train, *validation))
    return train, validation


def load_inputs(config: TrainingRunConfig, model_path: str, prompts: tuple[PromptSet, tuple[PromptSet, ...]]) -> Inputs:
    """Load the model's tokenizer and check it against its chat template, its context length and the prompts.

    Raises ConfigError naming the key and the prompt.
    """
    model = load_config(model_path, config.policy.hf_config_overrides).get_text_config()
    check_context_length(config.policy, model)
    tokenizer = load_tokenizer(config.policy.tokenizer, model_path)
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs)
    encoder.check()
    train, validation = prompts
    room = config.policy.max_total_sequence_length - 1  # for one sampled token
    check_prompt_lengths((train, *validation), encoder, min(config.data.max_input_seq_length or room, room))
    probes = train.prompts[: config.weight_sync.num_probe_prompts]
    return Inputs(
        tokenizer,
        encoder,
        train,
        validation,
        tuple(flat_token_ids(encoder.encode_prompt(p.messages, p.tools)) for p in probes),
        vocab_size=model.vocab_size,
    )


def check_context_length(policy: ModelConfig, model: PreTrainedConfig) -> None:
    """Raise ConfigError where the model cannot take `policy.max_total_sequence_length` tokens."""
    length = policy.max_total_sequence_length
    longest = getattr(model, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ConfigError("policy.max_total_sequence_length", length, f"the model takes {longest} tokens at most")


def check_tasks(config: RolloutRunConfig, prompt_sets: Sequence[PromptSet]) -> None:
    """Raise ConfigError for a prompt without an environment."""
    for prompt_set in prompt_sets:
        for task in sorted(prompt_set.task_names - config.env.keys()):
            raise ConfigError(f"env.{task}", None, f"needed by the dataset {prompt_set.name!r}", known=config.env)


def make_limits(config: RolloutRunConfig, *, max_retries: int | None = None) -> RolloutLimits:
    """Return the limits of all rollouts of a run; `max_retries` replaces `rollout.max_retries`."""
    return RolloutLimits(
        max_turns=config.max_rollout_turns,
        max_total_length=config.policy.max_total_sequence_length,
        generation_timeout_s=config.generation_timeout_s,
        max_retries=config.rollout.max_retries if max_retries is None else max_retries,
        retry_backoff_s=config.rollout.retry_backoff_s,
        stall_timeout_s=config.rollout.stall_timeout_s,
    )


def make_sampling(config: RolloutRunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling of training: the tokenizer's stop tokens first, then the configured ones."""
    generation = config.policy.generation
    stops = dict.fromkeys((*stop_token_ids, *(generation.stop_token_ids or ())))
    return SamplingParams(
        max_new_tokens=config.policy.max_response_length,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or -1,
        stop_token_ids=() if generation.ignore_eos else tuple(stops),
        stop_strings=tuple(generation.stop_strings or ()),
    )


def make_source(
    config: TrainingRunConfig,
    inputs: Inputs,
    dependencies: RolloutDependencies,
    *,
    on_rollout: Callable[[Trajectory], None] | None = None,
    writer: RolloutWriter | None = None,
) -> GroupSource:
    """Return the source of training groups: collected before each step or in the background, filtered with dynamic
    sampling on; or recorded responses."""
    algorithm = config.algorithm
    if isinstance(config, DistillationRunConfig) and config.distillation.off_policy:
        return RecordedResponseSource(
            _make_loader(config, inputs),
            inputs.encoder,
            num_prompts_per_step=algorithm.num_prompts_per_step,
            max_total_length=config.policy.max_total_sequence_length,
        )
    grpo = config.grpo if isinstance(config, GRPORunConfig) and config.grpo.use_dynamic_sampling else None
    num_prompts = algorithm.num_prompts_per_step
    if grpo is not None:
        num_prompts = prompts_per_batch(num_prompts, grpo.batch_multiplier)
    source = _make_collecting_source(
        config,
        _make_loader(config, inputs),
        dependencies,
        options=RolloutOptions(make_sampling(config, inputs.encoder.stop_token_ids), config.seed, on_rollout),
        num_prompts=num_prompts,
        writer=writer,
    )
    if grpo is None:
        return source
    return FilteredSource(
        source,
        return_groups=source.return_groups if isinstance(source, AsyncSource) else None,
        is_informative=is_informative,
        min_group_size=config.min_group_size,
        num_prompts_per_step=grpo.num_prompts_per_step,
        max_gen_batches=grpo.dynamic_sampling_max_gen_batches,
    )


def _make_collecting_source(
    config: TrainingRunConfig,
    loader: PromptLoader,
    dependencies: RolloutDependencies,
    *,
    options: RolloutOptions,
    num_prompts: int,
    writer: RolloutWriter | None,
) -> SyncSource | AsyncSource:
    algorithm, background = config.algorithm, config.algorithm.background
    shared: dict[str, Any] = {
        "num_prompts_per_step": num_prompts,
        "num_generations_per_prompt": algorithm.num_generations_per_prompt,
        "failures": config.rollout,
        "min_group_size": config.min_group_size,
        "writer": writer,
    }
    if not background.enabled:
        if config.rollout.oversample > 1 and not dependencies.generation.is_async:
            problem = "the engine samples all rollouts together, and none ends before the others: must be 1"
            raise ConfigError("rollout.oversample", config.rollout.oversample, problem)
        return SyncSource(loader, dependencies, options, **shared)
    return AsyncSource(
        loader,
        dependencies,
        options,
        max_age_steps=background.max_trajectory_age_steps,
        stale_groups=background.stale_groups,
        num_steps=algorithm.max_num_steps,
        max_generation_failures=background.max_generation_failures,
        **shared,
    )


def _make_loader(config: TrainingRunConfig, inputs: Inputs) -> PromptLoader:
    epochs = config.algorithm.max_num_epochs
    return PromptLoader(inputs.train.prompts, shuffle=config.data.shuffle, seed=config.seed, max_epochs=epochs)


def make_validator(config: TrainingRunConfig, inputs: Inputs, dependencies: RolloutDependencies) -> Validator | None:
    """Return the validator; None without validation sets."""
    if not inputs.validation:
        return None
    algorithm = config.algorithm
    sampling = make_sampling(config, dependencies.encoder.stop_token_ids)
    own = {
        "temperature": algorithm.val_temperature,
        "top_p": algorithm.val_top_p,
        "top_k": algorithm.val_top_k,
    }
    sampling = replace(sampling, **{name: value for name, value in own.items() if value is not None})
    return Validator(
        prompt_sets=inputs.validation,
        dependencies=dependencies,
        sampling=sampling,
        seed=config.seed,
        num_generations_per_prompt=algorithm.val_num_generations_per_prompt,
        batch_size=algorithm.val_batch_size,
        max_samples=algorithm.max_val_samples,
        greedy=algorithm.val_greedy,
    )


CALLS_PER_RUN = 16  # concurrent calls per agent run, on average; calls beyond that wait
MODEL_NAME = "policy"  # the name that agents see; any other model name is served too


def make_agents(config: RolloutRunConfig) -> dict[str, Agent]:
    """Return the agents of `env` by name; raises ConfigError for a function that cannot be imported."""
    return {
        name: ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type").make(name, section)
        for name, section in runner_sections(config).items()
        if not section.has_stack
    }


def runner_sections(config: RolloutRunConfig) -> dict[str, RolloutRunnerConfig]:
    """Return the entries of `env` that run whole rollouts through the gateway: agents and NeMo Gym stacks."""
    return {name: section for name, section in config.env.items() if isinstance(section, RolloutRunnerConfig)}


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

    max_concurrency = sum(section.max_concurrency for section in runner_sections(config).values())
    rules = CompletionRules(
        MODEL_NAME,
        max_model_len=config.policy.max_total_sequence_length,
        sampling=make_sampling(config, codec.encoder.stop_token_ids),
        seed=config.seed,
        max_concurrent_calls=CALLS_PER_RUN * max_concurrency,
        timeout_s=config.generation_timeout_s,
        answers_full_context=config.gateway.full_context == "length",
        max_queued_calls=config.gateway.max_queued_calls,
        queue_timeout_s=config.gateway.queue_timeout_s,
        can_guide=config.policy.generation.CAN_GUIDE,
        guided_calls=config.gateway.guided_calls,
        forced_tool_choice=config.gateway.forced_tool_choice,
    )
    manager = await GatewayManager.start(generation, codec, rules, config.gateway)
    stack.push_async_callback(manager.close)
    return manager


def agent_runtimes(
    config: RolloutRunConfig, agents: Mapping[str, Agent], manager: "GatewayManager"
) -> dict[str, AgentRuntime]:
    """Return every agent together with the gateway's sessions and its limits."""
    sections, selection = runner_sections(config), config.rollout.trajectory_selection
    return {name: make_agent_runtime(agent, sections[name], manager, selection) for name, agent in agents.items()}


def open_environments(config: RolloutRunConfig, stack: AsyncExitStack) -> dict[str, CheckedEnvironment]:
    """Open the environments of `env` by task name; `stack` closes them. Raises ConfigError for one that cannot be found
    or made."""
    environments: dict[str, CheckedEnvironment] = {}
    for name, section in config.env.items():
        if name not in runner_sections(config):
            environments[name] = make_environment(name, section)
            stack.push_async_callback(environments[name].close)
    return environments


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
    sections = {name: section for name, section in runner_sections(config).items() if section.has_stack}
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
    codec = make_codec(config, encoder) if runner_sections(config) else None
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
    return RolloutDependencies(generation, parts.environments, parts.encoder, limits, agents, gyms, scoring)
