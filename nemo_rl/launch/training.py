"""A training run on rollouts from its configuration: everything opened in order and closed in reverse, the records that
it leaves, and a summary at its end."""

import functools
import gc
import logging
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from nemo_rl import batch as keys
from nemo_rl.algorithms.distillation import Distillation, LogprobsStage, Teachers, TeacherTargetBuilder, TopKStage
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.algorithms.grpo import GRPO, RequiredLogprobs, make_penalties
from nemo_rl.algorithms.loop import TrainingProgress, train
from nemo_rl.algorithms.run import Algorithm, Interrupt, Placement, TrainingRun, cancel_on_sigterm
from nemo_rl.algorithms.supervised import SupervisedRun
from nemo_rl.checkpoint import CONFIG_FILE, CheckpointStore
from nemo_rl.config.checks import uses_cross_tokenizer
from nemo_rl.config.layout import Layout
from nemo_rl.config.loading import resolved_yaml
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutTrainingConfig, TrainingRunConfig
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.config.supervised import RewardModelRunConfig, SupervisedRunConfig
from nemo_rl.distributed.machine import write_private
from nemo_rl.errors import ConfigError
from nemo_rl.experience.records import DETAILS_FILE, RolloutDetails, RolloutWriter
from nemo_rl.experience.rollouts import RolloutDependencies
from nemo_rl.interfaces import AdvantageEstimator, Logger, LossFn, Policy
from nemo_rl.launch import rollouts
from nemo_rl.launch import teachers as teacher_setup
from nemo_rl.launch import workers as worker_setup
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.replicas import follow_requests
from nemo_rl.launch.workers import Workers, check_engine_build, check_model, engine_dtype, find_layout, open_workers
from nemo_rl.losses.make import LossContext, make_loss
from nemo_rl.observability import heartbeat
from nemo_rl.observability.console import configure_logging, make_progress, make_run_directory
from nemo_rl.observability.loggers import METRICS_FILE, make_logger
from nemo_rl.observability.summary import format_summary, summarize_rewards
from nemo_rl.policy.micro_batches import expected_optimizer_steps
from nemo_rl.policy.training import check_optimizer
from nemo_rl.weight_sync.refit import TransportWeightSync
from nemo_rl.weight_sync.transports import make_transport

logger = logging.getLogger(__name__)

GC_THRESHOLDS = (20_000, 20, 20)  # new objects before a collection, and collections before one of an older generation


def open_console(level: str) -> Console:
    """Return the console for log records of `logger.level` and above, and for the progress display."""
    disable_progress_bar()  # transformers' own, which would break the display
    return configure_logging(level)


def open_records(
    config: TrainingRunConfig | SupervisedRunConfig | RewardModelRunConfig, stack: ExitStack | AsyncExitStack
) -> tuple[Path, Logger]:
    """Create the run directory with the configuration in it, and the metric loggers, closed with `stack`."""
    run_dir = make_run_directory(config.logger.log_dir)
    write_private(run_dir / CONFIG_FILE, resolved_yaml(config))
    logger.info("run directory: %s", run_dir)
    metrics_logger = make_logger(config.logger, run_dir, config.model_dump(mode="json"))
    stack.callback(metrics_logger.close)
    return run_dir, metrics_logger


def make_checkpoint_store(section: CheckpointingConfig, run_dir: Path) -> CheckpointStore | None:
    """Return the checkpoint store; None where nothing is saved."""
    if not section.enabled:
        return None
    directory = Path(section.checkpoint_dir or run_dir / "checkpoints")
    heartbeat.record(checkpoint_dir=str(directory.absolute()))
    return CheckpointStore(section, directory)


def write_summary(
    run: TrainingRun | SupervisedRun,
    results: Callable[[Path], str],
    command: str,
    resume_overrides: Callable[[int], str | None],
) -> None:
    """Write the final summary to standard output: `results` of the metrics file, where things are, how to continue.

    `command` is how it was started; `resume_overrides(step)` returns the overrides that continue it after
    `step`, None where nothing is left to do.
    """
    latest = run.checkpoints.latest() if run.checkpoints else None
    resume_command = None
    if run.checkpoints is not None and latest is not None and (overrides := resume_overrides(latest.step)) is not None:
        resume_command = f"{command} checkpointing.checkpoint_dir={run.checkpoints.directory}{overrides}"
    path, checkpoint = run.run_dir / METRICS_FILE, latest.path if latest else None
    text = format_summary(results(path), metrics_path=path, checkpoint=checkpoint, continue_command=resume_command)
    sys.stdout.write(text + "\n")


def make_algorithm(
    config: TrainingRunConfig,
    inputs: rollouts.Inputs,
    policy: Policy,
    placement: Placement,
    teachers: Teachers | None = None,
    target_builders: Mapping[str, TeacherTargetBuilder] | None = None,
) -> Algorithm:
    """Return the algorithm; loads nothing. `target_builders` are for teachers with other tokenizers."""
    if isinstance(config, GRPORunConfig):
        return _make_grpo(config, inputs, policy, placement, teachers)
    if isinstance(config, DistillationRunConfig) and teachers is not None:
        if target_builders:
            context = teacher_setup.cross_tokenizer_context(config, inputs, target_builders)
            stage = teacher_setup.make_cross_tokenizer_stage(config, teachers, target_builders)
        else:
            context = LossContext(is_on_policy=not config.distillation.off_policy)
            stage = TopKStage(teachers, config.distillation.topk_logits_k, inputs.vocab_size)
        loss_fn = make_loss(config.loss_fn, context)
        return Distillation(config=config, loss_fn=loss_fn, teacher_stage=stage, placement=placement)
    raise ConfigError(config.algorithm_key, None, "not an algorithm of this project")


def _make_grpo(
    config: GRPORunConfig, inputs: rollouts.Inputs, policy: Policy, placement: Placement, teachers: Teachers | None
) -> GRPO:
    loss_fn = make_loss(config.loss_fn)
    estimator = make_advantage_estimator(config.grpo.adv_estimator, config.loss_fn)
    decode = functools.partial(inputs.encoder.decode, keep_special=True)
    return GRPO(
        config=config,
        loss_fn=loss_fn,
        advantage_estimator=estimator,
        required_logprobs=required_logprobs(config, loss_fn, estimator),
        policy=policy,
        placement=placement,
        teacher_stage=None if teachers is None else LogprobsStage(teachers),
        penalties=make_penalties(config.reward_penalties, config.grpo, decode),
    )


def required_logprobs(config: GRPORunConfig, loss_fn: LossFn, estimator: AdvantageEstimator) -> RequiredLogprobs:
    """Return the passes that something reads; with one optimizer step a batch, lp_prev is the loss's own lp."""
    num_steps = expected_optimizer_steps(config.grpo.num_samples_per_step, config.policy.train_global_batch_size)
    required = estimator.required_keys | loss_fn.required_keys
    if config.grpo.seq_logprob_error_threshold is not None or (num_steps > 1 and config.loss_fn.uses_prev_logprobs):
        required |= {keys.PREV_LOGPROBS}
    return RequiredLogprobs(
        previous=keys.PREV_LOGPROBS in required,
        reference=keys.REFERENCE_LOGPROBS in required,
    )


async def run_training(config: TrainingRunConfig, command: str) -> TrainingProgress:
    """Train, then write the summary to standard output; `command` is how the run was started."""
    with cancel_on_sigterm():  # as asyncio does for Ctrl-C: close what has been opened
        async with open_run(config) as run:
            with run.interrupt.listen():
                training = await train(run)
    write_summary(run, summarize_rewards, command, lambda step: _resume_overrides(run, step))
    return training


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run as far as it is known before a model is loaded."""

    layout: Layout
    model_path: str
    teacher_paths: Mapping[str, str]  # by the teacher's key
    inputs: rollouts.Inputs
    target_builders: Mapping[str, TeacherTargetBuilder] | None  # None: all teachers have the policy's tokenizer


async def _prepare_run(config: TrainingRunConfig) -> PreparedRun:
    """Check everything that can be refused before a model is loaded."""
    layout = find_layout(config)
    check_engine_build(config, layout)
    check_optimizer(config.policy)
    prompts = rollouts.load_prompts(config)  # before the model: making the quickstart's takes half a minute
    model_path = await resolve_model(config.policy.model_name)
    check_model(config.policy, model_path)
    teacher_paths = await teacher_setup.resolve_teachers(config)
    inputs = rollouts.load_inputs(config, model_path, prompts)
    teacher_setup.check_teachers_fit(config, inputs, teacher_paths)
    target_builders = (
        teacher_setup.make_target_builders(config, inputs, teacher_paths) if uses_cross_tokenizer(config) else None
    )
    return PreparedRun(layout, model_path, teacher_paths, inputs, target_builders)


@asynccontextmanager
async def open_run(config: TrainingRunConfig) -> AsyncIterator[TrainingRun]:
    """Open everything that the loop uses; configuration errors are raised before a model is loaded."""
    console = open_console(config.logger.level)
    prepared = await _prepare_run(config)
    inputs = prepared.inputs
    async with AsyncExitStack() as stack:
        worker_setup.join_cluster(config, prepared.layout)
        parts = await rollouts.open_rollout_parts(config, inputs.encoder, prepared.layout, stack)
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
        await stack.enter_async_context(follow_requests(workers.generation, run_dir))
        progress = make_progress(config.logger, console, rollouts_per_step=config.algorithm.num_samples_per_step)
        stack.callback(progress.close)
        dependencies = await _open_dependencies(config, inputs, parts, workers, run_dir, stack)
        await _log_teachers(config, prepared, dependencies, metrics_logger)
        writer = _rollout_writer(config, run_dir / "rollouts/train.jsonl", stack)
        source = rollouts.make_source(config, inputs, dependencies, on_rollout=progress.rollout, writer=writer)
        stack.push_async_callback(source.close)
        algorithm = make_algorithm(
            config, inputs, workers.policy, workers.placement, workers.teachers, prepared.target_builders
        )
        stack.enter_context(tuned_garbage_collection())
        yield TrainingRun(
            config=config,
            run_dir=run_dir,
            num_steps=_num_steps(config.algorithm, len(inputs.train.prompts)),
            algorithm=algorithm,
            source=source,
            generation=workers.generation,
            policy=workers.policy,
            placement=workers.placement,
            weight_sync=_open_weight_sync(config, inputs, prepared.layout, stack),
            validator=rollouts.make_validator(config, inputs, dependencies),
            checkpoints=make_checkpoint_store(config.checkpointing, run_dir),
            logger=metrics_logger,
            progress=progress,
            validation_rollouts=_rollout_writer(config, run_dir / "rollouts/validation.jsonl", stack),
            interrupt=Interrupt(),
            details=_rollout_details(config, inputs, run_dir, stack),
        )


async def _log_teachers(
    config: TrainingRunConfig, prepared: PreparedRun, dependencies: RolloutDependencies, metrics_logger: Logger
) -> None:
    """Log the metrics of the teachers themselves, as of step 0, where `distillation.val_teacher` is true."""
    if isinstance(config, DistillationRunConfig) and config.distillation.val_teacher:
        paths = prepared.teacher_paths
        metrics_logger.log_metrics(
            await teacher_setup.validate_teachers(config, prepared.inputs, dependencies, paths), 0
        )


@contextmanager
def tuned_garbage_collection() -> Iterator[None]:
    """Exempt what imports made from garbage collection, and collect less often until the block ends.

    Scanning the imports takes 75 ms, and none of it ever is garbage. By Python's own thresholds collections take more
    than a third of the driver's time with 16,384 rollouts open, nearly all of it to look at these again and again. The
    end of the block undoes this, unless the caller had exempted objects already: Python cannot tell whose are whose.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_frozen:
            gc.unfreeze()


async def _open_dependencies(
    config: TrainingRunConfig,
    inputs: rollouts.Inputs,
    parts: rollouts.RolloutParts,
    workers: Workers,
    run_dir: Path,
    stack: AsyncExitStack,
) -> RolloutDependencies:
    return await rollouts.open_rollout_dependencies(
        config,
        parts,
        workers.generation,
        limits=rollouts.make_limits(config),
        scoring_turn=workers.placement.scoring if config.reward_model.shares_device else None,
        prompt_sets=(inputs.train, *inputs.validation),
        gym_dir=run_dir,
        stack=stack,
    )


def _open_weight_sync(
    config: TrainingRunConfig, inputs: rollouts.Inputs, layout: Layout, stack: AsyncExitStack
) -> TransportWeightSync:
    weight_sync = TransportWeightSync(
        inputs.probes,
        config.weight_sync,
        engine_dtype(config),
        device=layout.device,
        sampling=rollouts.make_sampling(config, ()),
        keep_cache=not config.algorithm.background.recompute_kv_cache_after_weight_updates,
        transport=make_transport(config.weight_sync, layout),
    )
    stack.callback(weight_sync.close)
    return weight_sync


def _rollout_writer(config: TrainingRunConfig, path: Path, stack: AsyncExitStack) -> RolloutWriter | None:
    if not config.rollout.write_rollouts:
        return None
    return stack.enter_context(RolloutWriter(path, write_token_ids=config.rollout.write_token_ids))


def _rollout_details(
    config: TrainingRunConfig, inputs: rollouts.Inputs, run_dir: Path, stack: AsyncExitStack
) -> RolloutDetails | None:
    if not (config.rollout.write_rollouts and config.logger.rollout_details):
        return None
    details = RolloutDetails(
        run_dir / DETAILS_FILE,
        num_groups=config.logger.rollout_details,
        decode=functools.partial(inputs.encoder.decode, keep_special=True),
    )
    stack.callback(details.close)
    return details


def _num_steps(algorithm: RolloutTrainingConfig, num_prompts: int) -> int:
    """Return the number of steps that the data allows if each step takes its prompts once; dynamic sampling takes more,
    so it has fewer steps."""
    num_data_steps = math.ceil(algorithm.max_num_epochs * num_prompts / algorithm.num_prompts_per_step)
    return min(algorithm.max_num_steps, num_data_steps)


def _resume_overrides(run: TrainingRun, step: int) -> str:
    """Return the overrides that continue after the last step: as many steps again, or as many epochs where the data
    ended first."""
    section, key = run.config.algorithm, run.config.algorithm_key
    if step >= section.max_num_steps:
        return f" {key}.max_num_steps={2 * step}"
    return f" {key}.max_num_epochs={2 * section.max_num_epochs}" if step >= run.num_steps else ""
