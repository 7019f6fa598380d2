"""The rollout layer from the configuration: sampling, limits, the training source and the validator."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from nemo_rl.algorithms.filtering import is_informative
from nemo_rl.algorithms.validation import Validator
from nemo_rl.build.inputs import Inputs
from nemo_rl.config.master import GRPOConfig
from nemo_rl.data.loader import PromptLoader
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.rollouts import RolloutContext, RolloutLimits
from nemo_rl.experience.scoring import Scoring
from nemo_rl.experience.sources import FilteredSource, SyncSource, prompts_per_batch
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import Environment, Generation, GroupSource
from nemo_rl.types import SamplingParams


def make_context(
    config: GRPOConfig,
    inputs: Inputs,
    generation: Generation,
    environments: Mapping[str, Environment],
    on_rollout: Callable[[object], None],
    scoring: Scoring | None = None,
) -> RolloutContext:
    """What training and validation rollouts are run with; `on_rollout` is told each one as it ends."""
    limits = RolloutLimits(
        max_turns=config.grpo.max_rollout_turns,
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
        seed=config.grpo.seed,
        progress=on_rollout,
        scoring=scoring or Scoring(),
    )


def make_sampling(config: GRPOConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
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
    config: GRPOConfig, inputs: Inputs, context: RolloutContext, writer: RolloutWriter | None
) -> GroupSource:
    """Collection before each step or in the background, filtered where dynamic sampling is on."""
    grpo = config.grpo
    loader = PromptLoader(
        inputs.train.prompts, shuffle=config.data.shuffle, seed=grpo.seed, max_epochs=grpo.max_num_epochs
    )
    num_prompts = grpo.num_prompts_per_step
    if grpo.use_dynamic_sampling:
        num_prompts = prompts_per_batch(num_prompts, grpo.batch_multiplier)
    background = grpo.async_grpo
    if background.enabled:
        source = AsyncSource(
            loader,
            context,
            num_prompts_per_step=num_prompts,
            num_generations_per_prompt=grpo.num_generations_per_prompt,
            max_age_steps=background.max_trajectory_age_steps,
            stale_groups=background.stale_groups,
            num_steps=grpo.max_num_steps,
            max_generation_failures=background.max_generation_failures,
            failures=config.rollout,
            writer=writer,
        )
    else:
        source = SyncSource(
            loader,
            context,
            num_prompts_per_step=num_prompts,
            num_generations_per_prompt=grpo.num_generations_per_prompt,
            failures=config.rollout,
            writer=writer,
        )
    if not grpo.use_dynamic_sampling:
        return source
    return FilteredSource(
        source,
        give_back=source.give_back if isinstance(source, AsyncSource) else None,
        is_informative=is_informative,
        min_group_size=config.min_group_size,
        num_prompts_per_step=grpo.num_prompts_per_step,
        max_gen_batches=grpo.dynamic_sampling_max_gen_batches,
    )


def make_validator(config: GRPOConfig, inputs: Inputs, context: RolloutContext) -> Validator | None:
    """None without validation sets."""
    if not inputs.validation:
        return None
    grpo = config.grpo
    sampling = context.sampling
    if grpo.val_temperature is not None:
        sampling = replace(sampling, temperature=grpo.val_temperature)
    return Validator(
        prompt_sets=inputs.validation,
        context=replace(context, sampling=sampling, progress=None),  # which counts the rollouts of training
        num_generations_per_prompt=grpo.val_num_generations_per_prompt,
        batch_size=grpo.val_batch_size,
        max_samples=grpo.max_val_samples,
        greedy=grpo.val_greedy,
    )
