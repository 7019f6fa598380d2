"""Supervised training: its loop and validations, and what it learns from conversations (SFT) and preferences (DPO).

Shares the end of a step with loop.py, which trains on rollouts: its reports and checkpoints. DPO is arXiv:2305.18290:
its frozen reference is the policy before training, whose log-probs of each batch are computed just before the step.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.loop import TrainingProgress, checkpoint_metrics, report_step, save_if_due
from nemo_rl.algorithms.run import CheckpointWriter, Interrupt, Interrupted, Position, restore
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.supervised import DPOConfig, SupervisedRunConfig
from nemo_rl.data.supervised import Sample, SampleLoader, SupervisedDataset, make_pair_batch, make_supervised_batch
from nemo_rl.interfaces import Logger, LossFn, Policy, TokenScores
from nemo_rl.losses.supervised import NegativeLogLikelihood, PreferenceLoss, negative_log_likelihood
from nemo_rl.observability.console import Progress
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.policy.micro_batches import count_valid, loss_mask
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)


class Objective(Protocol):
    """The objective of a supervised algorithm over its samples."""

    @property
    def loss_fn(self) -> LossFn: ...

    def make_batch(self, samples: Sequence[Sample]) -> TrainingBatch:
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
    """Everything that a supervised run is made of; launch/supervised.py makes it."""

    config: SupervisedRunConfig
    objective: Objective
    run_dir: Path
    num_steps: int  # max_num_steps, or what the data allows
    source: SampleLoader
    validation: tuple[SupervisedDataset, ...]
    policy: Policy
    checkpoints: CheckpointStore | None
    logger: Logger
    progress: Progress
    interrupt: Interrupt


async def train_supervised(run: SupervisedRun) -> TrainingProgress:
    """Train until `max_num_steps`, the end of the epochs, or a signal, starting from the newest checkpoint."""
    async with CheckpointWriter(run) as checkpoint_writer:
        training = TrainingProgress(await restore(run), checkpoint_writer)
        run.progress.start(step=training.position.step, total=run.num_steps)
        if run.config.algorithm.val_at_start and training.position.step == 0:
            await _validate(run, training, StepTimer())
        while training.position.step < run.num_steps and not run.interrupt.requested:
            await train_one_step(run, training)
        training.interrupted = run.interrupt.requested
        if training.interrupted:
            await checkpoint_writer.begin(training.position, checkpoint_metrics(training))
    return training


async def train_one_step(run: SupervisedRun, training: TrainingProgress) -> None:
    """Run one optimizer step, then validate and save where due; advances `training`."""
    timer = StepTimer()
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
    report_step(run, step, metrics, timer)


def _should_validate(run: SupervisedRun, step: int) -> bool:
    config = run.config.algorithm
    due = config.val_period > 0 and step % config.val_period == 0
    return due or (config.val_at_end and step == run.num_steps)


async def _validate(run: SupervisedRun, training: TrainingProgress, timer: StepTimer) -> None:
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


def _batches(samples: Sequence[Sample], size: int, limit: int | None) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), size)[:limit]:
        yield samples[start : start + size]


class SFTObjective:
    """The likelihood of the conversations' trained tokens; satisfies `supervised.Objective`."""

    loss_fn = NegativeLogLikelihood()

    def make_batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """Return the conversations as a batch."""
        return make_supervised_batch(samples)

    async def add_logprobs(self, policy: Policy, batch: TrainingBatch) -> None:
        """Add nothing."""

    async def validation_sums(self, policy: Policy, batch: TrainingBatch) -> tuple[dict[str, float], float]:
        """Return the cross-entropy summed over the trained tokens, and their number."""
        loss = float(negative_log_likelihood(await policy.logprobs(batch), batch))
        return {"loss": loss}, float(loss_mask(batch).sum())


class DPOObjective:
    """The preference loss over pairs; satisfies `supervised.Objective`."""

    def __init__(self, section: DPOConfig) -> None:
        self.loss_fn = PreferenceLoss(section)

    def make_batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """Return the pairs as a batch of twice as many rows."""
        return make_pair_batch(samples)

    async def add_logprobs(self, policy: Policy, batch: TrainingBatch) -> None:
        """Add the reference's log-probs."""
        batch[keys.REFERENCE_LOGPROBS] = await policy.reference_logprobs(batch)

    async def validation_sums(self, policy: Policy, batch: TrainingBatch) -> tuple[dict[str, float], float]:
        """Return loss and metrics summed over the pairs, and the number of pairs."""
        await self.add_logprobs(policy, batch)
        scores = TokenScores(await policy.logprobs(batch))
        loss, metrics = self.loss_fn(scores, batch, count_valid(batch, torch.arange(len(batch))))
        num_pairs = float(metrics.pop("num_valid_samples").value)
        means = {"loss": float(loss)} | {name: float(metric.value) for name, metric in metrics.items()}
        return {name: value * num_pairs for name, value in means.items()}, num_pairs
