"""The loop of every algorithm that trains on rollouts.

Synchronous, asynchronous and filtered training differ only in `run.source`, algorithms only in `run.algorithm`.
"""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from nemo_rl.algorithms.interrupt import Interrupted
from nemo_rl.algorithms.report import report_step, report_validation
from nemo_rl.algorithms.resuming import CheckpointWriter, Position, Resumable, restore
from nemo_rl.algorithms.run import TrainingRun
from nemo_rl.errors import RolloutError
from nemo_rl.observability.timer import StepTimer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainingProgress:
    """Training progress of a run."""

    position: Position  # always the steps that the policy holds, so that a checkpoint is consistent at any await
    checkpoint_writer: CheckpointWriter
    metrics: dict[str, float] = field(default_factory=dict)  # of the last step that this process has trained
    validations: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by step
    data_exhausted: bool = False
    interrupted: bool = False


async def train(run: TrainingRun) -> TrainingProgress:
    """Train until `max_num_steps`, the end of the data, or a signal, starting from the newest checkpoint."""
    async with CheckpointWriter(run) as checkpoint_writer:
        training = TrainingProgress(await restore(run), checkpoint_writer)
        run.progress.start(step=training.position.step, total=run.num_steps)
        try:
            await _train(run, training)
        except Interrupted:
            logger.info("discarding in-flight rollouts; their prompts are re-queued on resume")
        except RolloutError:  # the policy state is consistent: save it before re-raising
            await checkpoint_writer.begin(training.position, checkpoint_metrics(training))
            raise
        training.interrupted = run.interrupt.requested
        if training.interrupted:
            await checkpoint_writer.begin(training.position, checkpoint_metrics(training))
    return training


async def _train(run: TrainingRun, training: TrainingProgress) -> None:
    refit_done = await _refit(run, training.position.step)
    if refit_done and run.config.algorithm.val_at_start and training.position.step == 0:
        await _validate(run, training, StepTimer())
    while _should_continue(run, training):
        await train_one_step(run, training)
    if training.data_exhausted:
        await _finish(run, training)


def _should_continue(run: TrainingRun, training: TrainingProgress) -> bool:
    at_end = training.position.step >= run.config.algorithm.max_num_steps
    return not (at_end or training.data_exhausted or run.interrupt.requested)


async def train_one_step(run: TrainingRun, training: TrainingProgress) -> None:
    """Collect, train, refit, then validate and save where due; advances `training`."""
    policy, step, timer = run.policy, training.position.step, StepTimer()
    with timer("total_step_time"):
        with timer(run.generation_phase):
            try:
                collected = await run.interrupt.guard(run.source.next_groups(weight_version=step))
            except StopAsyncIteration:
                training.data_exhausted = True
                return
        batch, metrics = await run.algorithm.make_batch(collected, timer)
        with timer("policy_training"):
            metrics |= await policy.train_step(batch, run.algorithm.loss_fn)
        if training.checkpoint_writer.has_pending:
            with timer("checkpointing"):
                await training.checkpoint_writer.finish()
        step += 1
        training.position, training.metrics = Position(step, run.source.state_dict()), metrics
        with timer("weight_sync"):
            refit_done = await _refit(run, step)
        if refit_done and _should_validate(run, step):
            await _validate(run, training, timer)
        await save_if_due(run, training, timer, is_last=step == run.config.algorithm.max_num_steps)
    report_step(run, step, metrics, timer)


async def _refit(run: TrainingRun, step: int) -> bool:
    """Refit the engine with the policy's weights and leave the device to it; return whether that happened.

    Background rollouts continue during the refit with `in_flight_weight_updates`; else they finish first, and none
    starts meanwhile. A stop requested while they finish skips the refit: the trained step is complete without it.
    """
    await run.placement.prepare_for_refit()
    async with AsyncExitStack() as stack:
        hold = run.source.hold(until_idle=not run.config.algorithm.background.in_flight_weight_updates)
        try:
            await run.interrupt.guard(stack.enter_async_context(hold))
        except Interrupted:
            logger.info("skipping the refit of step %d: a stop was requested", step)
            return False
        await run.weight_sync.publish(run.policy, run.generation, weight_version=step)
    await run.placement.prepare_for_generation()
    return True


async def _finish(run: TrainingRun, training: TrainingProgress) -> None:
    """Validate and save as after a last step, where the dataset ended before `max_num_steps`."""
    section = run.config.algorithm_key
    logger.info("dataset exhausted after %d steps (%s.max_num_epochs)", training.position.step, section)
    if run.config.algorithm.val_at_end and training.position.step not in training.validations:
        await _validate(run, training, StepTimer())
    await save_if_due(run, training, StepTimer(), is_last=True)


def _should_validate(run: TrainingRun, step: int) -> bool:
    config = run.config.algorithm
    due = config.val_period > 0 and step % config.val_period == 0
    return due or (config.val_at_end and step == config.max_num_steps)


async def _validate(run: TrainingRun, training: TrainingProgress, timer: StepTimer) -> None:
    """Validate where there is a validation set; a stop request discards the unfinished validation."""
    if run.validator is None:
        return
    try:
        with timer("total_validation_time"):
            async with run.source.hold():
                validation = await run.interrupt.guard(run.validator.validate())
    except Interrupted:
        logger.info("discarding the validation after step %d: a stop was requested", training.position.step)
        return
    training.validations[training.position.step] = validation.metrics
    report_validation(run, training.position.step, validation, timer)


async def save_if_due(run: Resumable, training: TrainingProgress, timer: StepTimer, *, is_last: bool) -> None:
    """Begin a checkpoint where one is due; finish it now after the last step or past the deadline, else later."""
    store = run.checkpoints
    if store is None or not store.should_save(training.position.step, is_last=is_last):
        return
    with timer("checkpointing"):
        await training.checkpoint_writer.begin(training.position, checkpoint_metrics(training))
        if is_last or store.deadline_reached:
            await training.checkpoint_writer.finish()


def checkpoint_metrics(training: TrainingProgress) -> dict[str, float]:
    """Return the metrics of the current step under the names of `checkpointing.metric_name`."""
    validation_metrics = training.validations.get(training.position.step, {})
    return {f"train:{k}": v for k, v in training.metrics.items()} | {
        f"val:{k}": v for k, v in validation_metrics.items()
    }
