"""Supervised training on conversations: the loop, and the loss on the validation sets.

Shares the end of a step with loop.py, which trains on rollouts: its reports and checkpoints.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_rl import batch as keys
from nemo_rl import nemo_rl_names
from nemo_rl.algorithms.loop import TrainingProgress, checkpoint_metrics, report_step, save_if_due
from nemo_rl.algorithms.run import CheckpointWriter, Interrupt, Interrupted, Position, restore
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.supervised import SFTRunConfig
from nemo_rl.data.supervised import SampleLoader, SupervisedDataset, SupervisedSample, make_supervised_batch
from nemo_rl.interfaces import Logger, Policy
from nemo_rl.losses.sft import NegativeLogLikelihood, negative_log_likelihood
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.observability.progress import Progress
from nemo_rl.policy.micro_batches import loss_mask

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SFTRun:
    """Everything that a supervised run is made of; launch/supervised.py makes it."""

    config: SFTRunConfig
    run_dir: Path
    num_steps: int  # max_num_steps, or what the data allows
    source: SampleLoader
    validation: tuple[SupervisedDataset, ...]
    policy: Policy
    checkpoints: CheckpointStore | None
    logger: Logger
    progress: Progress
    interrupt: Interrupt


async def train_sft(run: SFTRun) -> TrainingProgress:
    """Train until `max_num_steps`, the end of the epochs, or a signal, starting from the newest checkpoint."""
    async with CheckpointWriter(run) as checkpoint_writer:
        training = TrainingProgress(await restore(run), checkpoint_writer)
        run.progress.start(step=training.position.step, total=run.num_steps)
        if run.config.sft.val_at_start and training.position.step == 0:
            await _validate(run, training, StepTimer())
        while training.position.step < run.num_steps and not run.interrupt.requested:
            await train_one_step(run, training)
        training.interrupted = run.interrupt.requested
        if training.interrupted:
            await checkpoint_writer.begin(training.position, checkpoint_metrics(training))
    return training


async def train_one_step(run: SFTRun, training: TrainingProgress) -> None:
    """Run one optimizer step, then validate and save where due; advances `training`."""
    timer = StepTimer()
    with timer("total_step_time"):
        with timer("data_processing"):
            batch = make_supervised_batch(run.source.take(run.config.policy.train_global_batch_size))
        with timer("policy_training"):
            metrics = await run.policy.train_step(batch, NegativeLogLikelihood())
        if training.checkpoint_writer.has_pending:
            with timer("checkpointing"):
                await training.checkpoint_writer.finish()
        metrics["total_num_tokens"] = float(batch[keys.LENGTHS].sum())
        step = training.position.step + 1
        training.position, training.metrics = Position(step, run.source.state_dict()), metrics
        if _should_validate(run, step):
            await _validate(run, training, timer)
        await save_if_due(run, training, timer, is_last=step == run.num_steps)
    report_step(run, step, metrics, timer)


def _should_validate(run: SFTRun, step: int) -> bool:
    config = run.config.sft
    due = config.val_period > 0 and step % config.val_period == 0
    return due or (config.val_at_end and step == run.num_steps)


async def _validate(run: SFTRun, training: TrainingProgress, timer: StepTimer) -> None:
    """Validate where there is a validation set; a stop request discards the unfinished validation."""
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


async def validate(run: SFTRun) -> dict[str, float]:
    """Return the loss on the held-out conversations; with several sets also each set's own.

    Raises Interrupted between two batches when a stop is requested.
    """
    losses = {each.name: await _validation_loss(run, each) for each in run.validation}
    mean = {"loss": sum(losses.values()) / len(losses)}
    return mean if len(losses) == 1 else mean | {f"{name}/loss": loss for name, loss in losses.items()}


async def _validation_loss(run: SFTRun, held_out: SupervisedDataset) -> float:
    """Return the cross-entropy over all trained tokens of the first `val_batches` batches."""
    config, total, num_tokens = run.config.sft, 0.0, 0.0
    for samples in _batches(held_out.samples, config.val_global_batch_size, config.val_batches):
        if run.interrupt.requested:
            raise Interrupted("stopped by a signal")
        batch = make_supervised_batch(samples)
        total += float(negative_log_likelihood(await run.policy.logprobs(batch), batch))
        num_tokens += float(loss_mask(batch).sum())
    return total / num_tokens


def _batches(samples: Sequence[SupervisedSample], size: int, limit: int | None) -> Iterator[Sequence[SupervisedSample]]:
    for start in range(0, len(samples), size)[:limit]:
        yield samples[start : start + size]


__getattr__ = nemo_rl_names.refuse(__name__)
