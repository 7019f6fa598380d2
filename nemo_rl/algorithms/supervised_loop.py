"""The loop of supervised training (SFT, DPO) and its validations.

Shares reports and checkpoints with loop.py, which trains on rollouts.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nemo_rl import batch as keys
from nemo_rl.algorithms.checkpoint_writer import CheckpointWriter, Position, restore
from nemo_rl.algorithms.interrupt import Interrupt, Interrupted
from nemo_rl.algorithms.step_profiler import NO_PROFILES, StepProfiler
from nemo_rl.algorithms.training_progress import TrainingProgress, checkpoint_metrics, save_if_due
from nemo_rl.algorithms.training_reports import report_step
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.supervised_runs import SupervisedRunConfig
from nemo_rl.data.supervised_samples import SampleLoader, SupervisedDataset, TokenizedExample
from nemo_rl.interfaces import Logger, LossFn, Policy
from nemo_rl.observability.console import Progress
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)


class Objective(Protocol):
    """The objective of a supervised algorithm over its samples."""

    @property
    def loss_fn(self) -> LossFn: ...

    def make_batch(self, samples: Sequence[TokenizedExample]) -> TrainingBatch:
        """Return the samples as a right-padded batch."""
        ...

    async def add_logprobs(self, policy: Policy, batch: TrainingBatch) -> None:
        """Add the log-probs that the loss reads, in place."""
        ...

    async def validation_sums(self, policy: Policy, batch: TrainingBatch) -> tuple[dict[str, float], float]:
        """Return metrics summed over the batch, and the number that the sums over a whole set are divided by."""
        ...


@dataclass(frozen=True, slots=True)
class SupervisedRun:
    """Everything that a supervised run is made of; launch/supervised_training.py makes it."""

    config: SupervisedRunConfig
    objective: Objective
    run_dir: Path
    num_steps: int  # max_num_steps, or fewer if the data ends first
    source: SampleLoader
    validation: tuple[SupervisedDataset, ...]
    policy: Policy
    checkpoints: CheckpointStore | None
    logger: Logger
    progress: Progress
    interrupt: Interrupt
    num_devices: int = 1  # devices that train
    num_train_devices: int = 1
    profiler: StepProfiler = NO_PROFILES
    lost_records: LostRecords = field(default_factory=LostRecords)


async def train_supervised(run: SupervisedRun) -> TrainingProgress:
    """Train until `max_num_steps`, the end of the epochs, or a signal, starting from the newest checkpoint."""
    async with CheckpointWriter(run) as checkpoint_writer:
        training = TrainingProgress(await restore(run), checkpoint_writer)
        run.progress.start(step=training.position.step, total=run.num_steps)
        if run.config.algorithm.val_at_start and training.position.step == 0:
            await _validate(run, training, StepTimer())
        while training.position.step < run.num_steps and not run.interrupt.requested:
            async with run.profiler.profiled(training.position.step + 1):
                await train_one_step(run, training)
        training.interrupted = run.interrupt.requested
        if training.interrupted:
            await checkpoint_writer.begin(training.position, checkpoint_metrics(training))
    return training


async def train_one_step(run: SupervisedRun, training: TrainingProgress) -> None:
    """Run one optimizer step, then validate and save if due; advances `training`."""
    timer = StepTimer(step=training.position.step + 1)
    with timer("total_step_time"):
        with timer("data_processing"):
            batch = run.objective.make_batch(run.source.take(run.config.policy.train_global_batch_size))
        if run.config.needs_reference:
            with timer("policy_and_reference_logprobs"):
                await run.objective.add_logprobs(run.policy, batch)
        with timer("policy_training"):
            metrics = await run.policy.train_step(batch, run.objective.loss_fn)
        if training.checkpoint_writer.has_pending:
            with timer("checkpointing"):
                await training.checkpoint_writer.finish()
        metrics["total_num_tokens"] = float(batch[keys.LENGTHS].sum())
        step = training.position.step + 1
        training.position, training.metrics = Position(step, run.source.state_dict()), metrics
        if _should_validate(run, step):
            await _validate(run, training, timer)
        await save_if_due(run, training, timer, is_last=step == run.num_steps)
    report_step(run, step, metrics, timer, move_s={})


def _should_validate(run: SupervisedRun, step: int) -> bool:
    config = run.config.algorithm
    due = config.val_period > 0 and step % config.val_period == 0
    return due or (config.val_at_end and step == run.num_steps)


async def _validate(run: SupervisedRun, training: TrainingProgress, timer: StepTimer) -> None:
    """Validate if there is a validation set; a stop request discards the unfinished validation."""
    if not run.validation:
        return
    step = training.position.step
    try:
        with timer("total_validation_time"):
            metrics = await validate(run)
    except Interrupted:
        logger.info("discarding the validation after step %d: a stop was requested", step)
        return
    training.validations[step] = metrics
    named = {f"validation/{name}": value for name, value in metrics.items()}
    seconds = timer.seconds()["total_validation_time"]
    run.logger.log_metrics({**named, "timing/validation/total_validation_time": seconds}, step)
    run.progress.validation(step, metrics=metrics, columns=(), rows=())


async def validate(run: SupervisedRun) -> dict[str, float]:
    """Return the means over the held-out samples; of several sets their mean, and each set's own.

    Raises Interrupted between two batches when a stop is requested.
    """
    measured = {each.name: await _validate_one(run, each) for each in run.validation}
    names = next(iter(measured.values()))
    mean = {name: sum(values[name] for values in measured.values()) / len(measured) for name in names}
    if len(measured) == 1:
        return mean
    return mean | {f"{key}/{name}": value for key, values in measured.items() for name, value in values.items()}


async def _validate_one(run: SupervisedRun, held_out: SupervisedDataset) -> dict[str, float]:
    """Return the metrics of the first `val_batches` batches."""
    config, total, sums = run.config.algorithm, 0.0, Counter[str]()
    for samples in _batches(held_out.samples, config.val_global_batch_size, config.val_batches):
        if run.interrupt.requested:
            raise Interrupted("stopped by a signal")
        found, weight = await run.objective.validation_sums(run.policy, run.objective.make_batch(samples))
        sums.update(found)
        total += weight
    return {name: value / total for name, value in sums.items()}


def _batches(samples: Sequence[TokenizedExample], size: int, limit: int | None) -> Iterator[Sequence[TokenizedExample]]:
    for start in range(0, len(samples), size)[:limit]:
        yield samples[start : start + size]
