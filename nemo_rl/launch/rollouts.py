"""Inputs of a training run (tokenizer, chat template, datasets) and its rollout layer: sampling, limits, the training
source and the validator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nemo_rl.algorithms.advantages import is_informative
from nemo_rl.algorithms.validation import Validator
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import ModelConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.datasets import PromptSet, check_prompt_lengths, load_datasets
from nemo_rl.data.loader import PromptLoader
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ConfigError
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.rollouts import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.sources import FilteredSource, RecordedResponseSource, SyncSource, prompts_per_batch
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import GroupSource
from nemo_rl.policy.hf_model import load_config
from nemo_rl.types import SamplingParams, Trajectory


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
        "writer": writer,
    }
    if not background.enabled:
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
    if algorithm.val_temperature is not None:
        sampling = replace(sampling, temperature=algorithm.val_temperature)
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
