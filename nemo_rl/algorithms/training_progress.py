"""Training progress of a run, and the checkpoints that are due by it."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from nemo_rl.algorithms.checkpoint_writer import CheckpointWriter, Position, Resumable
from nemo_rl.algorithms.validation import ValidationResult
from nemo_rl.observability.loggers import StepTimer


@dataclass(frozen=True, slots=True)
class RunningValidation:
    """A validation of the policy after `step` beside the next step, whose refit waits for it."""

    step: int
    may_start: asyncio.Event  # set once the engine has room for it
    result: asyncio.Task[ValidationResult]
    timer: StepTimer


@dataclass(slots=True)
class TrainingProgress:
    position: Position  # always the steps that the policy holds, so that a checkpoint is consistent at any await
    checkpoint_writer: CheckpointWriter
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last step trained by this process
    validations: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by step
    running_validation: RunningValidation | None = None
    data_exhausted: bool = False
    interrupted: bool = False


async def save_if_due(
    run: Resumable,
    training: TrainingProgress,
    timer: StepTimer,
    *,
    is_last: bool,
    turn: AbstractAsyncContextManager[None] | None = None,
) -> None:
    """Begin a checkpoint if one is due; finish it now after the last step or past the deadline, else later.

    The policy is copied inside `turn`.
    """
    store = run.checkpoints
    if store is None or not store.should_save(training.position.step, is_last=is_last):
        return
    with timer("checkpointing"):
        async with turn or nullcontext():
            await training.checkpoint_writer.begin(training.position, checkpoint_metrics(training))
        if is_last or store.deadline_reached:
            await training.checkpoint_writer.finish()


def checkpoint_metrics(training: TrainingProgress) -> dict[str, float]:
    """Return the metrics of the current step under the names of `checkpointing.metric_name`."""
    validation_metrics = training.validations.get(training.position.step, {})
    return {f"train:{k}": v for k, v in training.metrics.items()} | prefix_validation(validation_metrics)


def prefix_validation(metrics: dict[str, float]) -> dict[str, float]:
    """Return validation metrics under the names of `checkpointing.metric_name`."""
    return {f"val:{name}": value for name, value in metrics.items()}
