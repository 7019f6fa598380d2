"""A training run on rollouts from its configuration: everything opened in order and closed in reverse, the records that
it leaves, and a summary at its end."""

import functools
import gc
import logging
import math
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from nemo_rl import batch as keys
from nemo_rl.algorithms.distillation import Distillation
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.algorithms.grpo import GRPO, RequiredLogprobs
from nemo_rl.algorithms.interrupt import Interrupt, cancel_on_termination
from nemo_rl.algorithms.loop import train
from nemo_rl.algorithms.reward_penalties import make_penalties
from nemo_rl.algorithms.stages import Algorithm
from nemo_rl.algorithms.step_profiler import make_profiler
from nemo_rl.algorithms.supervised_loop import SupervisedRun
from nemo_rl.algorithms.teacher_stages import LogprobsStage
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.checkpoint import CONFIG_FILE, CheckpointStore
from nemo_rl.config.loading import resolved_yaml, shown_values
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, RolloutTrainingConfig, TrainingRunConfig
from nemo_rl.config.shared_sections import CheckpointingConfig
from nemo_rl.config.supervised_runs import RewardModelRunConfig, SupervisedRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.distributed.machine import write_private
from nemo_rl.durable_files import hold_directory
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollout_dependencies import RolloutDependencies
from nemo_rl.experience.rollout_details import DETAILS_FILE, RolloutDetails
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.interfaces import AdvantageEstimator, LossFn
from nemo_rl.launch import teachers as teacher_setup
from nemo_rl.launch.memory_plan import memory_plan
from nemo_rl.launch.out_of_memory import advise_on_memory
from nemo_rl.launch.replicas import follow_requests
from nemo_rl.launch.resolved_run import ResolvedRun, resolve_run
from nemo_rl.launch.rollout_layer import RolloutParts, open_rollout_dependencies, open_rollout_parts
from nemo_rl.launch.run_directory import choose_run_directory, discard_records_after, name_run
from nemo_rl.launch.sampling import make_limits, make_sampling
from nemo_rl.launch.training_source import make_source, make_validator
from nemo_rl.launch.workers import Workers, join_cluster, open_workers
from nemo_rl.losses.make import make_loss
from nemo_rl.observability import heartbeat
from nemo_rl.observability.console import configure_logging, make_progress
from nemo_rl.observability.loggers import METRICS_FILE, CompositeLogger, make_logger
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.observability.open_trace import open_trace
from nemo_rl.observability.run_record import recorded_run
from nemo_rl.observability.summary import format_summary, summarize_rewards
from nemo_rl.observability.user_code_record import USER_CODE
from nemo_rl.policy.micro_batches import expected_optimizer_steps
from nemo_rl.weight_sync.refit import TransportWeightSync
from nemo_rl.weight_sync.transports import make_transport

logger = logging.getLogger(__name__)

GC_THRESHOLDS = (20_000, 20, 20)  # new objects before a collection, and collections before one of an older generation


def open_console(level: str) -> Console:
    """Return the console for log records of `logger.level` and above, and for the progress display."""
    disable_progress_bar()  # transformers' own, which would break the display
    return configure_logging(level)


def open_records(
    config: TrainingRunConfig | SupervisedRunConfig | RewardModelRunConfig,
    stack: ExitStack | AsyncExitStack,
    lost: LostRecords,
    interrupt: Interrupt | None = None,
) -> tuple[Path, CompositeLogger]:
    """Open the run directory with the configuration in it, and the metric loggers, closed with `stack`.

    It is a new one, unless the run resumes. `lost` counts the records that cannot be written there; `interrupt` knows
    whether the run was asked to stop. Raises ConfigError if another process uses the directory.
    """
    section = config.checkpointing
    chosen = choose_run_directory(config.logger, section if isinstance(section, CheckpointingConfig) else None)
    run_dir, key = chosen.path, "checkpointing.checkpoint_dir" if chosen.is_resumed else "logger.log_dir"
    stack.enter_context(hold_directory(run_dir, key=key))
    is_interrupted = (lambda: False) if interrupt is None else (lambda: interrupt.requested)
    stack.enter_context(recorded_run(run_dir, config.logger, is_interrupted=is_interrupted))
    write_private(run_dir / CONFIG_FILE, resolved_yaml(config))
    logger.info("run directory: %s", run_dir)
    metrics_logger = make_logger(config.logger, run_dir, shown_values(config), lost=lost)
    stack.callback(metrics_logger.close)
    stack.enter_context(open_trace(config.logger.trace, run_dir, lost, model_name=config.policy.model_name))
    return run_dir, metrics_logger


def open_checkpoints(
    config: TrainingRunConfig | SupervisedRunConfig,
    run_dir: Path,
    metrics_logger: CompositeLogger,
    stack: ExitStack | AsyncExitStack,
) -> CheckpointStore | None:
    """Return the checkpoint store, of this run alone until `stack` closes; None if nothing is saved.

    Records of steps after the one that the run resumes from are set aside. Without a validation set no metric of
    validations ranks the checkpoints: the newest are kept. Call it before models are loaded and anything is logged: it
    raises ConfigError if another run uses the directory, CheckpointError if all its checkpoints are damaged.
    """
    section = config.checkpointing
    if not section.enabled:
        return None
    if (section.metric_name or "").startswith("val:") and not config.data.validates:
        logger.warning(
            "data.validation is not set: keeping the newest checkpoints, not the best %s", section.metric_name
        )
        section = section.model_copy(update={"metric_name": None})
    directory = Path(section.checkpoint_dir or run_dir / "checkpoints")
    stack.enter_context(hold_directory(directory, key="checkpointing.checkpoint_dir"))
    name_run(directory, run_dir)
    heartbeat.record(checkpoint_dir=str(directory.absolute()))
    store = CheckpointStore(section, directory)
    if (resumed := store.resume_point()) is not None:
        discard_records_after(run_dir, resumed.step)
        metrics_logger.resume_after(resumed.step)
    return store


@contextmanager
def recorded_user_code(checkpoints: CheckpointStore | None) -> Iterator[None]:
    """Name the user code in flight beside the checkpoints until the block ends, and what ended an earlier run there."""
    if checkpoints is None:
        yield
        return
    checkpoints.directory.mkdir(parents=True, exist_ok=True)
    seen = USER_CODE.open(checkpoints.directory)
    if seen.in_flight:
        logger.warning(
            "the last run on %s ended without a word while user code was in flight: %s; if that code calls os._exit or "
            "aborts, set `isolated: true` in its entry of env",
            checkpoints.directory,
            seen.in_flight,
        )
    try:
        yield
    finally:
        USER_CODE.close()


def write_summary(
    run: TrainingRun | SupervisedRun,
    results: Callable[[Path], str],
    command: str,
    resume_overrides: Callable[[int], str | None],
) -> None:
    """Write the final summary to standard output: `results` of the metrics file, where things are, how to continue.

    `command` is how it was started; `resume_overrides(step)` returns the overrides that continue it after
    `step`, None if nothing is left to do. Raises RecordError at the end for a run that has lost records.
    """
    latest = run.checkpoints.latest() if run.checkpoints else None
    resume_command = None
    if run.checkpoints is not None and latest is not None and (overrides := resume_overrides(latest.step)) is not None:
        resume_command = _with_overrides(
            command, f"checkpointing.checkpoint_dir={run.checkpoints.directory}", *overrides.split()
        )
    path, checkpoint = run.run_dir / METRICS_FILE, latest.path if latest else None
    text = format_summary(
        results(path),
        metrics_path=path,
        checkpoint=checkpoint,
        continue_command=resume_command,
        lost=str(run.lost_records),
    )
    sys.stdout.write(text + "\n")
    run.lost_records.check()


def _with_overrides(command: str, *overrides: str) -> str:
    """Return a command line with the overrides at its end, without those of the same keys before."""
    beginnings = tuple(f"{override.partition('=')[0]}=" for override in overrides)
    return shlex.join([*(word for word in shlex.split(command) if not word.startswith(beginnings)), *overrides])


def make_algorithms(run: ResolvedRun, workers: Workers) -> dict[str, Algorithm]:
    """Return the algorithm of each policy that is trained, by name; loads nothing."""
    config = run.config
    if isinstance(config, GRPORunConfig):
        encoder = run.policy.encoder
        return {name: _make_grpo(config, loss, encoder, workers) for name, loss in config.losses.items()}
    return {"": _make_distillation(run, config, workers)}


def _make_distillation(run: ResolvedRun, config: TrainingRunConfig, workers: Workers) -> Algorithm:
    if isinstance(config, DistillationRunConfig) and workers.teachers is not None:
        return Distillation(
            config=config,
            loss_fn=make_loss(config.loss_fn, teacher_setup.make_loss_context(run, config)),
            teacher_stage=teacher_setup.make_teacher_stage(run, config, workers.teachers),
            placement=workers.placement,
        )
    raise ConfigError(config.algorithm_key, None, "not an algorithm of this project")


def _make_grpo(config: GRPORunConfig, loss: LossConfig, encoder: ChatEncoder, workers: Workers) -> GRPO:
    loss_fn = make_loss(loss)
    estimator = make_advantage_estimator(config.grpo.adv_estimator, loss)
    decode = functools.partial(encoder.decode, keep_special=True)
    return GRPO(
        config=config,
        loss_fn=loss_fn,
        advantage_estimator=estimator,
        required_logprobs=required_logprobs(config, loss_fn, estimator, loss=loss),
        policy=workers.policy,
        placement=workers.placement,
        teacher_stage=None if workers.teachers is None else LogprobsStage(workers.teachers),
        penalties=make_penalties(config.reward_penalties, config.grpo, decode),
    )


def required_logprobs(
    config: GRPORunConfig, loss_fn: LossFn, estimator: AdvantageEstimator, *, loss: LossConfig | None = None
) -> RequiredLogprobs:
    """Return the passes that something reads; with one optimizer step a batch, lp_prev is the loss's own lp.

    `loss` is the section of `loss_fn`; None: that of the run.
    """
    num_steps = expected_optimizer_steps(config.grpo.num_samples_per_step, config.policy.train_global_batch_size)
    required = estimator.required_keys | loss_fn.required_keys
    if config.grpo.seq_logprob_error_threshold is not None or (
        num_steps > 1 and (loss or config.loss_fn).uses_prev_logprobs
    ):
        required |= {keys.PREV_LOGPROBS}
    return RequiredLogprobs(
        previous=keys.PREV_LOGPROBS in required or config.policy.router_replay.records_own,
        reference=keys.REFERENCE_LOGPROBS in required,
    )


async def run_training(config: TrainingRunConfig, command: str) -> TrainingProgress:
    """Train, then write the summary to standard output; `command` is how the run was started."""
    with cancel_on_termination():  # as asyncio does for Ctrl-C: close what has been opened
        async with open_run(config) as run:
            with run.interrupt.listen():
                training = await train(run)
    write_summary(run, summarize_rewards, command, lambda step: _resume_overrides(run, step))
    return training


@asynccontextmanager
async def open_run(config: TrainingRunConfig) -> AsyncIterator[TrainingRun]:
    """Open everything that the loop uses; configuration errors are raised before a model is loaded."""
    console = open_console(config.logger.level)
    run = await resolve_run(config)
    memory_plan(config, run.layout).log_problems()
    async with AsyncExitStack() as stack:
        stack.enter_context(advise_on_memory(config))
        join_cluster(config, run.layout)
        parts = await open_rollout_parts(config, run.policy.encoder, stack, layout=run.layout)
        lost, interrupt = LostRecords(), Interrupt()
        run_dir, metrics_logger = open_records(config, stack, lost, interrupt)
        checkpoints = open_checkpoints(config, run_dir, metrics_logger, stack)
        overlong = {f"data/validation/{name}/num_overlong": float(n) for name, n in run.overlong_measured.items()}
        if any(overlong.values()) and (checkpoints is None or checkpoints.resume_point() is None):
            metrics_logger.log_metrics(overlong, 0)
        workers = await open_workers(run, log_dir=run_dir / "logs", stack=stack)
        await stack.enter_async_context(follow_requests(workers.generation, run_dir))
        progress = make_progress(config.logger, console, rollouts_per_step=config.algorithm.num_samples_per_step)
        stack.callback(progress.close)
        dependencies = await _open_dependencies(run, parts, workers, run_dir, stack)
        if isinstance(config, DistillationRunConfig) and config.distillation.val_teacher:
            metrics_logger.log_metrics(await teacher_setup.validate_teachers(run, dependencies), 0)
        writer = _rollout_writer(config, run_dir / "rollouts/train.jsonl", stack, lost)
        source = make_source(run, dependencies, on_rollout=progress.rollout, writer=writer)
        stack.push_async_callback(source.close)
        stack.enter_context(tuned_garbage_collection())
        stack.enter_context(recorded_user_code(checkpoints))
        yield TrainingRun(
            config=config,
            run_dir=run_dir,
            num_steps=_num_steps(config.algorithm, len(run.train.prompts)),
            algorithms=make_algorithms(run, workers),
            source=source,
            generation=workers.generation,
            policy=workers.policy,
            placement=workers.placement,
            weight_sync=_open_weight_sync(run, stack),
            validator=make_validator(config, run.validation, dependencies),
            checkpoints=checkpoints,
            logger=metrics_logger,
            progress=progress,
            validation_rollouts=_rollout_writer(config, run_dir / "rollouts/validation.jsonl", stack, lost),
            interrupt=interrupt,
            num_devices=run.layout.num_devices,
            num_train_devices=run.layout.num_train_devices,
            profiler=make_profiler(config.logger.profile, run_dir, workers.policy, workers.generation),
            details=_rollout_details(config, run.policy.encoder, run_dir, stack, lost),
            lost_records=lost,
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
    run: ResolvedRun, parts: RolloutParts, workers: Workers, run_dir: Path, stack: AsyncExitStack
) -> RolloutDependencies:
    config = run.config
    return await open_rollout_dependencies(
        config,
        parts,
        workers.generation,
        limits=make_limits(config),
        scoring_turn=workers.placement.scoring if config.reward_model.shares_device else None,
        prompt_sets=(run.train, *run.validation),
        gym_dir=run_dir,
        stack=stack,
    )


def _open_weight_sync(run: ResolvedRun, stack: AsyncExitStack) -> TransportWeightSync:
    config = run.config
    weight_sync = TransportWeightSync(
        run.probes,
        config.weight_sync,
        config.policy.engine_dtype,
        device=run.layout.device,
        sampling=make_sampling(config, ()),
        keep_cache=not config.algorithm.background.recompute_kv_cache_after_weight_updates,
        transport=make_transport(config.weight_sync, run.layout),
        adapter_only=config.weight_sync.adapter == "separate",
        policies=config.policy_names,
    )
    stack.callback(weight_sync.close)
    return weight_sync


def _rollout_writer(
    config: TrainingRunConfig, path: Path, stack: AsyncExitStack, lost: LostRecords
) -> RolloutWriter | None:
    if not config.rollout.write_rollouts:
        return None
    return stack.enter_context(
        RolloutWriter(
            path,
            write_token_ids=config.rollout.write_token_ids,
            write_token_columns=config.rollout.write_token_columns,
            write_thumbnails=config.rollout.write_thumbnails,
            lost=lost,
        )
    )


def _rollout_details(
    config: TrainingRunConfig, encoder: ChatEncoder, run_dir: Path, stack: AsyncExitStack, lost: LostRecords
) -> RolloutDetails | None:
    if not (config.rollout.write_rollouts and config.logger.rollout_details):
        return None
    details = RolloutDetails(
        run_dir / DETAILS_FILE,
        num_groups=config.logger.rollout_details,
        decode=functools.partial(encoder.decode, keep_special=True),
        lost=lost,
    )
    stack.callback(details.close)
    return details


def _num_steps(algorithm: RolloutTrainingConfig, num_prompts: int) -> int:
    """Return the number of steps that the data allows if each step takes its prompts once; dynamic sampling takes more,
    so it has fewer steps."""
    num_data_steps = math.ceil(algorithm.max_num_epochs * num_prompts / algorithm.num_prompts_per_step)
    return min(algorithm.max_num_steps, num_data_steps)


def _resume_overrides(run: TrainingRun, step: int) -> str:
    """Return the overrides that continue after the last step: as many steps again, or as many epochs if the data
    ended first."""
    section, key = run.config.algorithm, run.config.algorithm_key
    if step >= section.max_num_steps:
        return f" {key}.max_num_steps={2 * step}"
    return f" {key}.max_num_epochs={2 * section.max_num_epochs}" if step >= run.num_steps else ""
