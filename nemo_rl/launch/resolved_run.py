"""A run on rollouts as far as it is known before weights are loaded: resolved once, then passed on as one value.

Errors in a recipe or its data end a run here, before anything is opened.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias

from nemo_rl.algorithms.cross_tokenizer_stage import TeacherTargetBuilder
from nemo_rl.algorithms.step_observers import describe_limits
from nemo_rl.config.checks import check_task_teachers, uses_teachers
from nemo_rl.config.layout import Layout
from nemo_rl.config.layout_planner import make_layout, make_policy_layout
from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.supervised_runs import SupervisedRunConfig
from nemo_rl.data.chat import flat_token_ids
from nemo_rl.data.processors import check_answer
from nemo_rl.data.prompt_screen import (
    LengthLimit,
    PromptScreen,
    check_measured_prompts,
    check_training_prompts,
    trainable_prompts,
)
from nemo_rl.data.prompt_sets import PromptSet, load_prompt_sets
from nemo_rl.data.prompts import Blend
from nemo_rl.distributed.devices import ALL_DEVICES, Device, choose_device, has_gpu
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.launch.resolved_model import (
    ResolvedModel,
    check_images_are_seen,
    make_target_builders,
    resolve_policy,
    resolve_teachers,
)
from nemo_rl.policy.optimizers import check_optimizer
from nemo_rl.types import Prompt, placed_images
from nemo_rl.weight_sync.adapters import DESCRIPTIONS, choose_adapter_refit
from nemo_rl.weight_sync.transports import choose_transport
from nemo_rl.weight_sync.verification import Probe

logger = logging.getLogger(__name__)

SHORT_TOKENS, LONG_MODEL_TOKENS = 128, 1024  # a limit for toy tasks, and a context that no toy model has
COMPARING = ("math", "tools")  # types of environments that compare a response with `answer`
GPU_KEYS = {"gpus_per_node", "gpu_memory_gb"}  # keys of `cluster` that describe the machines of a run

AnyTrainingConfig: TypeAlias = TrainingRunConfig | SupervisedRunConfig


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run on rollouts, before anything is opened."""

    config: TrainingRunConfig
    layout: Layout
    policy: ResolvedModel
    train: PromptSet
    validation: tuple[PromptSet, ...]
    teachers: Mapping[str, ResolvedModel] = field(default_factory=dict)  # by the teacher's key
    screen: PromptScreen = field(default_factory=PromptScreen)  # judges training prompts when they are drawn
    overlong_measured: Mapping[str, int] = field(default_factory=dict)  # over-long prompts by validation set
    # by the teacher's key, if teachers are queried in tokens of their own tokenizer
    target_builders: Mapping[str, TeacherTargetBuilder] = field(default_factory=dict)

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Return the prompts on which a refit is verified."""
        encoder, count = self.policy.encoder, self.config.weight_sync.num_probe_prompts
        prompts = islice(trainable_prompts(self.train.prompts, self.screen), count)
        logs = (encoder.encode_prompt(prompt.messages, prompt.tools) for prompt in prompts)
        return tuple(Probe(flat_token_ids(log), placed_images(log)) for log in logs)


async def resolve_run(config: TrainingRunConfig) -> ResolvedRun:
    """Resolve a run on rollouts; raises ConfigError or DataError for whatever can be refused before weights load."""
    layout = find_layout(config)
    check_engine_build(config, layout)
    return await resolve_on(config, layout)


async def resolve_on(config: TrainingRunConfig, layout: Layout) -> ResolvedRun:
    """Resolve a run for a layout, whose devices need not be here; raises as `resolve_run` about all but them."""
    check_optimizer(config.policy)
    train, validation = load_prompts(config)  # before the model: making the quickstart's takes half a minute
    policy = await resolve_policy(config.policy)
    check_images_are_seen(config, policy.encoder)
    check_stop_tokens(config, policy.vocab_size)
    _warn_of_short_limits(config, policy)
    config, layout = _fit_engine_to_model(config, layout, policy)
    config = _choose_adapter_refit(config, layout, policy)
    room = config.policy.max_total_sequence_length - 1  # leaves room for one sampled token
    limit = LengthLimit(policy.encoder, min(config.data.max_input_seq_length or room, room))
    screen = PromptScreen(limit, config.data.overlong, train.held_out, _answer_check(config))
    check_training_prompts(train, screen)
    count = config.algorithm.max_val_samples
    overlong = {one.name: check_measured_prompts(one, limit, config.data.overlong, count) for one in validation}
    run = ResolvedRun(config, layout, policy, train, validation, screen=screen, overlong_measured=overlong)
    if not uses_teachers(config):
        return run
    check_task_teachers(config, train.task_names)
    teachers = await resolve_teachers(config, policy)
    return replace(run, teachers=teachers, target_builders=make_target_builders(config, policy, teachers))


def _fit_engine_to_model(
    config: TrainingRunConfig, layout: Layout, policy: ResolvedModel
) -> tuple[TrainingRunConfig, Layout]:
    """Return configuration and layout with an engine of its own process for a model that needs one."""
    assert policy.config is not None
    before = config.policy.generation
    generation = before.for_model(policy.config.architectures or ())
    if generation is before:
        return config, layout
    section = config.policy.model_copy(update={"generation": generation})
    config = config.model_copy(update={"policy": section})
    return config, _make_layout(config, layout.device)


def _choose_adapter_refit(config: TrainingRunConfig, layout: Layout, policy: ResolvedModel) -> TrainingRunConfig:
    """Return the configuration with `weight_sync.adapter` chosen, and log the choice of a run with adapters."""
    chosen, reason = choose_adapter_refit(config, layout, policy.config)
    if config.policy.parallelism.adapter_dim is not None:
        logger.info("refits bring the adapter %s: %s", DESCRIPTIONS[chosen], reason)
    return config.model_copy(update={"weight_sync": config.weight_sync.model_copy(update={"adapter": chosen})})


def load_prompts(config: TrainingRunConfig) -> tuple[PromptSet, tuple[PromptSet, ...]]:
    """Load training and validation prompts, each with a configured environment; needs no model."""
    train, validation = load_prompt_sets(config.data, config.seed)
    check_tasks(config, (train, *validation))
    _check_answers(config, (train, *validation))
    return train, validation


def check_tasks(config: RolloutRunConfig, prompt_sets: Sequence[PromptSet]) -> None:
    """Raise ConfigError for a prompt without an environment."""
    for prompt_set in prompt_sets:
        for task in sorted(prompt_set.task_names - config.env.keys()):
            raise ConfigError(f"env.{task}", None, f"needed by the dataset {prompt_set.name!r}", known=config.env)


def _warn_of_short_limits(config: TrainingRunConfig, policy: ResolvedModel) -> None:
    """Warn of limits that a recipe for a toy model has left to a model of long answers."""
    total = config.policy.max_total_sequence_length
    if total <= SHORT_TOKENS and (policy.max_length or 0) >= LONG_MODEL_TOKENS:
        logger.warning(
            "prompt and response have %d tokens together, of the %d that the model takes: %s",
            total, policy.max_length, describe_limits(config.policy),
        )  # fmt: skip


def check_stop_tokens(config: TrainingRunConfig, vocab_size: int) -> None:
    """Raise ConfigError for a stop token that the model cannot sample."""
    tokens = config.policy.generation.stop_token_ids or []
    if beyond := [token for token in tokens if token >= vocab_size]:
        problem = f"{beyond} are no tokens of the model; allowed: 0 to {vocab_size - 1}"
        raise ConfigError("policy.generation.stop_token_ids", tokens, problem)


def _check_answers(config: RolloutRunConfig, prompt_sets: Sequence[PromptSet]) -> None:
    """Raise DataError for a prompt whose reference answer its environment could not compare with any response.

    Of rows that stay in their files a sample is checked.
    """
    check = _answer_check(config)
    for prompt_set in prompt_sets:
        prompts = prompt_set.prompts
        for index in prompts.spread(all_in_memory=True) if isinstance(prompts, Blend) else range(len(prompts)):
            prompt = prompts[index]
            try:
                check(prompt)
            except DataError as error:
                raise DataError(f"{prompt_set.name}: prompt {index} of env.{prompt.task_name}: {error}") from error


def _answer_check(config: RolloutRunConfig) -> Callable[[Prompt], None]:
    """Return the function that raises DataError for a reference answer that equals no response."""
    compared = {name for name, section in config.env.items() if (section.type or name) in COMPARING}

    def check(prompt: Prompt) -> None:
        if prompt.task_name in compared:
            check_answer(prompt.env_state.get("answer"), "answer")

    return check


def find_layout(config: AnyTrainingConfig) -> Layout:
    """Return the layout on the device that the installed engine can use; raises ConfigError.

    With `policy.device: cuda` this machine needs no CUDA device if a cluster has them.
    """
    engine_devices, wanted = _engine_devices(config), config.policy.device
    device = choose_device("auto", engine_devices) if wanted == "auto" else wanted
    layout = _make_layout(config, device)
    if not layout.needs_cluster:
        choose_device(device, engine_devices)
    return layout


def find_planned_layouts(config: AnyTrainingConfig) -> tuple[Layout, ...]:
    """Return the layouts of a dry run; raises ConfigError.

    On a machine without a GPU, such as a login node, `cluster.gpus_per_node` and `gpu_memory_gb` of the recipe are
    believed: the layout on such GPUs follows that of this machine, or replaces it if the engine runs on GPUs alone.
    """
    names_gpus = config.cluster.gpus_per_node > 0 and bool(config.cluster.model_fields_set & GPU_KEYS)
    if not names_gpus or config.policy.device == "cpu" or has_gpu():
        return (find_layout(config),)
    on_gpus = _make_layout(config, "cuda")
    if config.policy.device == "cuda" or "cpu" not in _engine_devices(config):
        return (on_gpus,)
    return find_layout(config), on_gpus


def _engine_devices(config: AnyTrainingConfig) -> tuple[Device, ...]:
    return ALL_DEVICES if isinstance(config, SupervisedRunConfig) else config.policy.generation.devices


def _make_layout(config: AnyTrainingConfig, device: Device) -> Layout:
    if isinstance(config, SupervisedRunConfig):
        return make_policy_layout(config.policy, config.cluster, device)
    layout = make_layout(config, device)
    choose_transport(config.weight_sync.transport, layout)
    choose_adapter_refit(config, layout)
    return layout


def check_engine_build(config: TrainingRunConfig, layout: Layout) -> None:
    """Raise ConfigError if the installed engine cannot run on the layout's device, on this machine or another."""
    choose_device(layout.device, config.policy.generation.devices, is_remote=True)
