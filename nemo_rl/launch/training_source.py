"""Consumers of rollouts during training: the source of groups, and the validator."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_rl.algorithms.advantages import is_informative
from nemo_rl.algorithms.validation import Validator
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, TrainingRunConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.errors import ConfigError
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.filtered_source import FilteredSource
from nemo_rl.experience.recorded_response_source import RecordedResponseSource
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.experience.sync_source import SyncSource, prompts_per_batch
from nemo_rl.interfaces import GroupSource
from nemo_rl.launch.resolved_run import ResolvedRun
from nemo_rl.launch.sampling import make_sampling
from nemo_rl.types import Trajectory


def make_source(
    run: ResolvedRun,
    dependencies: RolloutDependencies,
    *,
    on_rollout: Callable[[Trajectory], None] | None = None,
    writer: RolloutWriter | None = None,
) -> GroupSource:
    """Return the source of training groups: collected before each step or in the background, filtered with dynamic
    sampling on; or recorded responses."""
    config, encoder = run.config, run.policy.encoder
    algorithm = config.algorithm
    loader = PromptLoader(
        run.train.prompts,
        shuffle=config.data.shuffle,
        seed=config.seed,
        max_epochs=algorithm.max_num_epochs,
        screen=run.screen,
        sizes=run.train.sizes,
        mix=config.data.train_mix or (),
    )
    if isinstance(config, DistillationRunConfig) and config.distillation.off_policy:
        return RecordedResponseSource(
            loader,
            encoder,
            num_prompts_per_step=algorithm.num_prompts_per_step,
            max_total_length=config.policy.max_total_sequence_length,
        )
    grpo = config.grpo if isinstance(config, GRPORunConfig) and config.grpo.use_dynamic_sampling else None
    num_prompts = algorithm.num_prompts_per_step
    if grpo is not None:
        num_prompts = prompts_per_batch(num_prompts, grpo.batch_multiplier)
    options = RolloutOptions(make_sampling(config, encoder.stop_token_ids), config.seed, on_rollout)
    source = _make_collecting_source(config, loader, dependencies, options, num_prompts=num_prompts, writer=writer)
    if grpo is None:
        return source
    return FilteredSource(
        source,
        return_groups=source.return_groups if isinstance(source, AsyncSource) else None,
        is_informative=partial(is_informative, by_name=grpo.adv_estimator.reads_named_rewards),
        min_group_size=config.min_group_size,
        num_prompts_per_step=grpo.num_prompts_per_step,
        max_gen_batches=grpo.dynamic_sampling_max_gen_batches,
    )


def _make_collecting_source(
    config: TrainingRunConfig,
    loader: PromptLoader,
    dependencies: RolloutDependencies,
    options: RolloutOptions,
    *,
    num_prompts: int,
    writer: RolloutWriter | None,
) -> SyncSource | AsyncSource:
    algorithm, background = config.algorithm, config.algorithm.background
    shared: dict[str, Any] = {
        "num_prompts_per_step": num_prompts,
        "num_generations_per_prompt": algorithm.num_generations_per_prompt,
        "failures": config.rollout,
        "min_group_size": config.min_group_size,
        "greedy_baseline": isinstance(config, GRPORunConfig) and config.grpo.adv_estimator.needs_greedy_baseline,
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


def make_validator(
    config: TrainingRunConfig, prompt_sets: tuple[PromptSet, ...], dependencies: RolloutDependencies
) -> Validator | None:
    """Return the validator; None without validation sets."""
    if not prompt_sets:
        return None
    algorithm = config.algorithm
    own = {"temperature": algorithm.val_temperature, "top_p": algorithm.val_top_p, "top_k": algorithm.val_top_k}
    sampling = replace(make_sampling(config, dependencies.encoder.stop_token_ids), return_sampling_mask=False)
    return Validator(
        prompt_sets=prompt_sets,
        dependencies=dependencies,
        sampling=replace(sampling, **{name: value for name, value in own.items() if value is not None}),
        seed=config.seed,
        num_generations_per_prompt=algorithm.val_num_generations_per_prompt,
        batch_size=algorithm.val_batch_size,
        max_samples=algorithm.max_val_samples,
        greedy=algorithm.val_greedy,
        correct_reward=algorithm.val_correct_reward,
    )
