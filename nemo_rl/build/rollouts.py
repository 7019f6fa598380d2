"""The rollout layer from the configuration: sampling, limits, the training source and the validator."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from nemo_rl.algorithms.filtering import is_informative
from nemo_rl.algorithms.validation import Validator
from nemo_rl.build.inputs import Inputs
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.loader import PromptLoader
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.recorded_responses import RecordedResponses
from nemo_rl.experience.rollouts import RolloutContext, RolloutLimits
from nemo_rl.experience.scoring import Scoring
from nemo_rl.experience.sources import FilteredSource, SyncSource, prompts_per_batch
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import Environment, Generation, GroupSource
from nemo_rl.types import SamplingParams


class HasEncoder(Protocol):
    """`Inputs`, or those of a collection."""

    @property
    def encoder(self) -> ChatEncoder: ...


def make_context(
    config: RolloutRunConfig,
    inputs: HasEncoder,
    generation: Generation,
    environments: Mapping[str, Environment],
    on_rollout: Callable[[object], None],
    scoring: Scoring | None = None,
) -> RolloutContext:
    """What training and validation rollouts are run with; `on_rollout` is told each one as it ends."""
    limits = RolloutLimits(
        max_turns=config.max_rollout_turns,
        max_total_length=config.policy.max_total_sequence_length,
        # `env.<name>.timeout_s` is kept by make_environment, for functions an item at a time: a deadline around the
        # whole call would also count the wait for a free thread, and fail all items for one that hangs.
        environment_timeout_s=dict.fromkeys(config.env),
        generation_timeout_s=config.policy.generation.timeout_s,
        max_retries=config.rollout.max_retries,
        retry_backoff_s=config.rollout.retry_backoff_s,
        stall_timeout_s=config.rollout.stall_timeout_s,
    )
    return RolloutContext(
        generation=generation,
        environments=environments,
        encoder=inputs.encoder,
        limits=limits,
        sampling=make_sampling(config, inputs.encoder.stop_token_ids),
        seed=config.seed,
        progress=on_rollout,
        scoring=scoring or Scoring(),
    )


def make_sampling(config: RolloutRunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """Training's sampling; the tokenizer's stop tokens come first, then those configured."""
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
    config: TrainingRunConfig, inputs: Inputs, context: RolloutContext, writer: RolloutWriter | None
) -> GroupSource:
    """Collection before each step or in the background, filtered where dynamic sampling is on; or what was recorded."""
    algorithm = config.algorithm
    if isinstance(config, DistillationRunConfig) and config.distillation.off_policy:
        return RecordedResponses(
            _make_loader(config, inputs),
            inputs.encoder,
            num_prompts_per_step=algorithm.num_prompts_per_step,
            max_total_length=config.policy.max_total_sequence_length,
        )
    grpo = config.grpo if isinstance(config, GRPORunConfig) and config.grpo.use_dynamic_sampling else None
    num_prompts = algorithm.num_prompts_per_step
    if grpo is not None:
        num_prompts = prompts_per_batch(num_prompts, grpo.batch_multiplier)
    source = _make_collecting_source(config, inputs, context, writer, num_prompts=num_prompts)
    if grpo is None:
        return source
    return FilteredSource(
        source,
        give_back=source.give_back if isinstance(source, AsyncSource) else None,
        is_informative=is_informative,
        min_group_size=config.min_group_size,
        num_prompts_per_step=grpo.num_prompts_per_step,
        max_gen_batches=grpo.dynamic_sampling_max_gen_batches,
    )


def _make_collecting_source(
    config: TrainingRunConfig,
    inputs: Inputs,
    context: RolloutContext,
    writer: RolloutWriter | None,
    *,
    num_prompts: int,
) -> SyncSource | AsyncSource:
    algorithm, background = config.algorithm, config.algorithm.background
    loader = _make_loader(config, inputs)
    shared: dict[str, Any] = {
        "num_prompts_per_step": num_prompts,
        "num_generations_per_prompt": algorithm.num_generations_per_prompt,
        "failures": config.rollout,
        "writer": writer,
    }
    if not background.enabled:
        return SyncSource(loader, context, **shared)
    return AsyncSource(
        loader,
        context,
        max_age_steps=background.max_trajectory_age_steps,
        stale_groups=background.stale_groups,
        num_steps=algorithm.max_num_steps,
        max_generation_failures=background.max_generation_failures,
        **shared,
    )


def _make_loader(config: TrainingRunConfig, inputs: Inputs) -> PromptLoader:
    epochs = config.algorithm.max_num_epochs
    return PromptLoader(inputs.train.prompts, shuffle=config.data.shuffle, seed=config.seed, max_epochs=epochs)


def make_validator(config: TrainingRunConfig, inputs: Inputs, context: RolloutContext) -> Validator | None:
    """None without validation sets."""
    if not inputs.validation:
        return None
    algorithm = config.algorithm
    sampling = context.sampling
    if algorithm.val_temperature is not None:
        sampling = replace(sampling, temperature=algorithm.val_temperature)
    return Validator(
        prompt_sets=inputs.validation,
        context=replace(context, sampling=sampling, progress=None),  # which counts the rollouts of training
        num_generations_per_prompt=algorithm.val_num_generations_per_prompt,
        batch_size=algorithm.val_batch_size,
        max_samples=algorithm.max_val_samples,
        greedy=algorithm.val_greedy,
    )
