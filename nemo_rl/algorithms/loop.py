"""The loop of every algorithm that trains on rollouts.

Synchronous, asynchronous and filtered training differ only in `run.source`, algorithms only in `run.algorithms`.
Checkpoints, validation and rollout details are observers of a step.
"""

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

from nemo_rl.algorithms.checkpoint_writer import CheckpointWriter, Position, restore
from nemo_rl.algorithms.interrupt import Interrupted
from nemo_rl.algorithms.policy_steps import make_batches, merge_policy_metrics, train_policies
from nemo_rl.algorithms.step_histograms import HistogramObserver
from nemo_rl.algorithms.step_observers import CheckpointObserver, DetailsObserver, StepObserver, TruncationObserver
from nemo_rl.algorithms.training_progress import TrainingProgress, checkpoint_metrics
from nemo_rl.algorithms.training_reports import report_step, report_train_samples
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.algorithms.validation_observer import ValidationObserver
from nemo_rl.errors import RolloutError
from nemo_rl.experience.rollout_dispatch import flatten_groups
from nemo_rl.interfaces import HistogramLogger
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.tracing import span
from nemo_rl.types import CollectedGroups

logger = logging.getLogger(__name__)


async def train(run: TrainingRun) -> TrainingProgress:
    """Train until `max_num_steps`, the end of the data, or a signal, starting from the newest checkpoint."""
    async with CheckpointWriter(run) as checkpoint_writer:
        training = TrainingProgress(await restore(run), checkpoint_writer)
        run.progress.start(step=training.position.step, total=run.num_steps)
        try:
            await _train_all_steps(run, training, make_observers(run, training))
        except Interrupted:
            logger.info("discarding in-flight rollouts; their prompts are re-queued on resume")
        except RolloutError:  # the policy state is consistent: save it before re-raising
            await checkpoint_writer.begin(training.position, checkpoint_metrics(training))
            raise
        training.interrupted = run.interrupt.requested
        if training.interrupted:
            await checkpoint_writer.begin(training.position, checkpoint_metrics(training))
    return training


def make_observers(run: TrainingRun, training: TrainingProgress) -> Sequence[StepObserver]:
    """Return the observers of a run; a checkpoint comes after the validation that ranks it."""
    details = [] if run.details is None else [DetailsObserver(run, training, run.details)]
    validation = [] if run.validator is None else [ValidationObserver(run, training, run.validator)]
    histograms = [HistogramObserver(run.logger, training)] if isinstance(run.logger, HistogramLogger) else []
    truncation = TruncationObserver(run, training)
    return (*details, *histograms, truncation, *validation, CheckpointObserver(run, training))


async def _train_all_steps(run: TrainingRun, training: TrainingProgress, observers: Sequence[StepObserver]) -> None:
    try:
        if await _refit(run, training.position.step):
            for each in observers:
                await each.at_start()
        while _should_continue(run, training):
            async with run.profiler.profiled(training.position.step + 1):
                await train_one_step(run, training, observers)
        if training.data_exhausted:
            section = run.config.algorithm_key
            logger.info("dataset exhausted after %d steps (%s.max_num_epochs)", training.position.step, section)
            for each in observers:
                await each.at_data_end()
    finally:
        for each in observers:
            await each.at_exit()


def _should_continue(run: TrainingRun, training: TrainingProgress) -> bool:
    at_end = training.position.step >= run.config.algorithm.max_num_steps
    return not (at_end or training.data_exhausted or run.interrupt.requested)


async def train_one_step(run: TrainingRun, training: TrainingProgress, observers: Sequence[StepObserver]) -> None:
    """Collect rollouts, train on them and refit the engine; advances `training`."""
    step = training.position.step + 1
    timer = StepTimer(step=step)
    with timer("total_step_time"):
        with timer(run.generation_phase):
            collected = await _collect(run, training)
        if collected is None:
            return
        for each in observers:
            await each.after_collection(timer)
        batches = await make_batches(run, collected, timer)
        made = next(iter(batches.values()))  # observers see the batch of the first policy
        for each in observers:
            await each.before_training(made, timer)
        with timer("policy_training"):
            metrics = merge_policy_metrics(await train_policies(run, batches), collected.metrics)
        training.position, training.metrics = Position(step, run.source.state_dict()), metrics
        for each in observers:
            await each.after_training(made, timer)
        with timer("weight_sync"):
            refit_done = await _refit(run, step)
        for each in observers:
            await each.after_refit(timer, refit_done=refit_done)
        for each in observers:
            await each.at_step_end()
    with span("report", step=step):
        report_step(run, step, metrics, timer, move_s=run.placement.take_seconds())
        report_train_samples(run, step, flatten_groups(collected.groups))


async def _collect(run: TrainingRun, training: TrainingProgress) -> CollectedGroups | None:
    """Return the rollouts of the next step; None once the dataset is exhausted."""
    try:
        return await run.interrupt.guard(run.source.next_groups(weight_version=training.position.step))
    except StopAsyncIteration:
        training.data_exhausted = True
        return None


async def _refit(run: TrainingRun, step: int) -> bool:
    """Refit the engine with the policy's weights and leave the device to it; return whether that happened.

    Background rollouts continue during the refit with `in_flight_weight_updates`, or under their own weights if the
    engine keeps these; else they finish first, and none starts meanwhile. A stop requested while they finish skips the
    refit: the trained step is complete without it.
    """
    continues = run.config.algorithm.background.in_flight_weight_updates or run.weight_sync.keeps_versions
    async with AsyncExitStack() as stack:
        hold = run.source.hold(until_idle=not continues)
        try:
            await run.interrupt.guard(stack.enter_async_context(hold))
        except Interrupted:
            logger.info("skipping the refit of step %d: a stop was requested", step)
            return False
        await run.weight_sync.publish(run.policy, run.generation, weight_version=step, turns=run.placement)
    return True
