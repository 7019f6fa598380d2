"""A training run from its configuration: everything opened in order, closed in reverse, and a summary at the end."""

import gc
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl.algorithms.cross_tokenizer import TeacherTargetBuilder
from nemo_rl.algorithms.interrupt import Interrupt, cancel_on_sigterm
from nemo_rl.algorithms.loop import TrainingProgress, train
from nemo_rl.algorithms.run import TrainingRun
from nemo_rl.build.algorithms import make_algorithm
from nemo_rl.build.cross_tokenizer import make_target_builders
from nemo_rl.build.inputs import Inputs, load_inputs, load_prompts
from nemo_rl.build.models import resolve_model
from nemo_rl.build.records import make_checkpoint_store, open_console, open_records, write_summary
from nemo_rl.build.rollouts import make_context, make_source, make_validator
from nemo_rl.build.surroundings import attach_agents, open_rollout_dependencies
from nemo_rl.build.teacher_validation import validate_teachers
from nemo_rl.build.teachers import check_teachers_fit, resolve_teachers
from nemo_rl.build.workers import check_model, engine_dtype, find_layout, open_workers
from nemo_rl.config.algorithm import RolloutTrainingConfig
from nemo_rl.config.layout import Layout
from nemo_rl.config.master import DistillationRunConfig, TrainingRunConfig
from nemo_rl.config.teacher_checks import uses_cross_tokenizer
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.observability.progress import make_progress
from nemo_rl.observability.summary import summarize_rewards
from nemo_rl.policy.optim import check_optimizer
from nemo_rl.weight_sync.make import make_transport
from nemo_rl.weight_sync.refit import TransportWeightSync


async def run_training(config: TrainingRunConfig, command: str) -> TrainingProgress:
    """Train, then write the summary to standard output; `command` is how the run was started."""
    with cancel_on_sigterm():  # as asyncio does for Ctrl-C: what has been opened is closed
        async with open_run(config) as run:
            with run.interrupt.listen():
                training = await train(run)
    write_summary(run, summarize_rewards, command, lambda step: _resume_overrides(run, step))
    return training


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """What is known of a run before a model is loaded."""

    layout: Layout
    model_path: str
    teacher_paths: Mapping[str, str]  # by the teacher's key
    inputs: Inputs
    target_builders: Mapping[str, TeacherTargetBuilder] | None  # None: all teachers have the policy's tokenizer


async def _prepare_run(config: TrainingRunConfig) -> PreparedRun:
    """What can be refused is refused here."""
    layout = find_layout(config)
    check_optimizer(config.policy)
    prompts = load_prompts(config)  # before the model, since the quickstart's takes half a minute to make
    model_path = await resolve_model(config.policy.model_name)
    check_model(config.policy, model_path)
    teacher_paths = await resolve_teachers(config)
    inputs = load_inputs(config, model_path, prompts)
    check_teachers_fit(config, inputs, teacher_paths)
    target_builders = make_target_builders(config, inputs, teacher_paths) if uses_cross_tokenizer(config) else None
    return PreparedRun(layout, model_path, teacher_paths, inputs, target_builders)


@asynccontextmanager
async def open_run(config: TrainingRunConfig) -> AsyncIterator[TrainingRun]:
    """Everything that the loop uses; what can be refused is refused before a model is loaded."""
    console = open_console()
    prepared = await _prepare_run(config)
    inputs = prepared.inputs
    async with AsyncExitStack() as stack:
        surroundings = await open_rollout_dependencies(config, inputs.encoder, prepared.layout, stack)
        run_dir, metrics_logger = open_records(config, stack)
        workers = await open_workers(
            config,
            inputs,
            prepared.model_path,
            prepared.teacher_paths,
            prepared.layout,
            log_dir=run_dir / "logs",
            stack=stack,
        )
        placement = workers.placement
        weight_sync = _open_weight_sync(config, inputs, prepared.layout, stack)
        progress = make_progress(config.logger, console, rollouts_per_step=config.algorithm.num_samples_per_step)
        stack.callback(progress.close)
        context = make_context(
            config, inputs, workers.generation, surroundings.environments, progress.rollout, surroundings.scoring
        )
        if config.reward_model.shares_device:
            context = replace(context, scoring=replace(context.scoring, turn=placement.scoring))
        prompt_sets = (inputs.train, *inputs.validation)
        context = await attach_agents(
            context, surroundings, config, prompt_sets=prompt_sets, gym_dir=run_dir, stack=stack
        )
        if isinstance(config, DistillationRunConfig) and config.distillation.val_teacher:
            metrics_logger.log_metrics(await validate_teachers(config, inputs, context, prepared.teacher_paths), 0)
        source = make_source(config, inputs, context, _rollout_writer(config, run_dir / "rollouts/train.jsonl", stack))
        stack.push_async_callback(source.close)
        algorithm = make_algorithm(
            config, inputs, workers.policy, placement, workers.teachers, prepared.target_builders
        )
        gc.collect()
        gc.freeze()  # what the imports left is never garbage, and looking through it takes 75 ms
        yield TrainingRun(
            config=config,
            run_dir=run_dir,
            num_steps=_num_steps(config.algorithm, len(inputs.train.prompts)),
            algorithm=algorithm,
            source=source,
            generation=workers.generation,
            policy=workers.policy,
            placement=placement,
            weight_sync=weight_sync,
            validator=make_validator(config, inputs, context),
            checkpoints=make_checkpoint_store(config.checkpointing, run_dir),
            logger=metrics_logger,
            progress=progress,
            validation_rollouts=_rollout_writer(config, run_dir / "rollouts/validation.jsonl", stack),
            interrupt=Interrupt(),
        )


def _open_weight_sync(
    config: TrainingRunConfig, inputs: Inputs, layout: Layout, stack: AsyncExitStack
) -> TransportWeightSync:
    weight_sync = TransportWeightSync(
        inputs.probes,
        config.weight_sync,
        engine_dtype(config),
        temperature=config.policy.generation.temperature,
        keep_cache=not config.algorithm.background.recompute_kv_cache_after_weight_updates,
        transport=make_transport(config.weight_sync.transport, layout),
    )
    stack.callback(weight_sync.close)
    return weight_sync


def _rollout_writer(config: TrainingRunConfig, path: Path, stack: AsyncExitStack) -> RolloutWriter | None:
    if not config.rollout.write_rollouts:
        return None
    return stack.enter_context(RolloutWriter(path, write_token_ids=config.rollout.write_token_ids))


def _num_steps(algorithm: RolloutTrainingConfig, num_prompts: int) -> int:
    """What the data allows where each step takes its prompts once; dynamic sampling takes more, so has fewer steps."""
    num_data_steps = math.ceil(algorithm.max_num_epochs * num_prompts / algorithm.num_prompts_per_step)
    return min(algorithm.max_num_steps, num_data_steps)


def _resume_overrides(run: TrainingRun, step: int) -> str:
    """Behind the last step: as many again, or as many epochs where the data ended first."""
    section, key = run.config.algorithm, run.config.algorithm_key
    if step >= section.max_num_steps:
        return f" {key}.max_num_steps={2 * step}"
    return f" {key}.max_num_epochs={2 * section.max_num_epochs}" if step >= run.num_steps else ""
