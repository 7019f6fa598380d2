"""The loop of every algorithm that trains on rollouts, and its reports: metrics, rates, waits and samples of a step.

Synchronous, asynchronous and filtered training differ only in `run.source`, algorithms only in `run.algorithm`.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from nemo_rl.algorithms.run import CheckpointWriter, Interrupted, Position, Resumable, TrainingRun, restore
from nemo_rl.algorithms.validation import ValidationResult, Validator
from nemo_rl.errors import RolloutError
from nemo_rl.experience.supervision import cancel_all
from nemo_rl.interfaces import Logger
from nemo_rl.observability.console import Progress
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import FailureClass, Trajectory

logger = logging.getLogger(__name__)

POLICY_PHASES = ("policy_and_reference_logprobs", "policy_training")
WAITING_PHASES = {
    "generation": ("generation", "exposed_generation"),
    "teachers": ("teacher_logprobs",),
    "weight_sync": ("weight_sync",),
    "checkpointing": ("checkpointing",),
}
SAMPLE_COLUMNS = ("prompt", "response", "reward", "stop_reason")


@dataclass(frozen=True, slots=True)
class RunningValidation:
    """A validation of the policy after `step` beside the next step, whose refit waits for it."""

    step: int
    may_start: asyncio.Event  # set once the engine has room for it
    result: asyncio.Task[ValidationResult]
    timer: StepTimer


@dataclass(slots=True)
class TrainingProgress:
    """Training progress of a run."""

    position: Position  # always the steps that the policy holds, so that a checkpoint is consistent at any await
    checkpoint_writer: CheckpointWriter
    metrics: dict[str, float] = field(default_factory=dict)  # of the last step that this process has trained
    validations: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics by step
    running_validation: RunningValidation | None = None
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
    try:
        refit_done = await _refit(run, training.position.step)
        if refit_done and run.config.algorithm.val_at_start and training.position.step == 0:
            if _may_overlap(run, 0):
                _begin_validation(run, training)
            else:
                await _validate(run, training, StepTimer())
        while _should_continue(run, training):
            await train_one_step(run, training)
        if training.data_exhausted:
            await _finish(run, training)
    finally:
        await _discard_validation(training)


def _should_continue(run: TrainingRun, training: TrainingProgress) -> bool:
    at_end = training.position.step >= run.config.algorithm.max_num_steps
    return not (at_end or training.data_exhausted or run.interrupt.requested)


async def train_one_step(run: TrainingRun, training: TrainingProgress) -> None:
    """Collect, train, refit, then validate and save where due; advances `training`.

    With `val_overlap` a validation begins after the save and ends before the next refit, at the latest.
    """
    policy, step, timer = run.policy, training.position.step, StepTimer()
    with timer("total_step_time"):
        with timer(run.generation_phase):
            try:
                collected = await run.interrupt.guard(run.source.next_groups(weight_version=step))
            except StopAsyncIteration:
                training.data_exhausted = True
                return
        if running := training.running_validation:
            running.may_start.set()
            if running.result.done() or run.placement.shares_device:
                await _join_validation(run, training, timer)
        made = await run.algorithm.make_batch(collected, timer)
        if run.details is not None:
            run.details.mark(step + 1, made.batch)
        # before training: a death in it then costs this step alone
        if training.checkpoint_writer.has_pending and training.running_validation is None:
            with timer("checkpointing"):
                await training.checkpoint_writer.finish_if_written()
        with timer("policy_training"):
            metrics = made.metrics | await policy.train_step(made.batch, run.algorithm.loss_fn)
        step += 1
        training.position, training.metrics = Position(step, run.source.state_dict()), metrics
        if run.details is not None:
            with timer("rollout_details"):
                await run.details.record(step, made.batch, made.rows, policy)
        await _join_validation(run, training, timer)
        if training.checkpoint_writer.has_pending:
            with timer("checkpointing"):
                await training.checkpoint_writer.finish()
        with timer("weight_sync"):
            refit_done = await _refit(run, step)
        should_validate, overlaps = refit_done and _should_validate(run, step), _may_overlap(run, step)
        if should_validate and not overlaps:
            await _validate(run, training, timer)
        await _save_in_turn(run, training, timer, is_last=step == run.config.algorithm.max_num_steps)
        if should_validate and overlaps:
            _begin_validation(run, training)
    report_step(run, step, metrics, timer)


async def _refit(run: TrainingRun, step: int) -> bool:
    """Refit the engine with the policy's weights and leave the device to it; return whether that happened.

    Background rollouts continue during the refit with `in_flight_weight_updates`; else they finish first, and none
    starts meanwhile. A stop requested while they finish skips the refit: the trained step is complete without it.
    """
    async with AsyncExitStack() as stack:
        hold = run.source.hold(until_idle=not run.config.algorithm.background.in_flight_weight_updates)
        try:
            await run.interrupt.guard(stack.enter_async_context(hold))
        except Interrupted:
            logger.info("skipping the refit of step %d: a stop was requested", step)
            return False
        await run.weight_sync.publish(run.policy, run.generation, weight_version=step, turns=run.placement)
    return True


async def _finish(run: TrainingRun, training: TrainingProgress) -> None:
    """Validate and save as after a last step, where the dataset ended before `max_num_steps`."""
    section = run.config.algorithm_key
    logger.info("dataset exhausted after %d steps (%s.max_num_epochs)", training.position.step, section)
    await _join_validation(run, training, StepTimer())
    if run.config.algorithm.val_at_end and training.position.step not in training.validations:
        await _validate(run, training, StepTimer())
    await _save_in_turn(run, training, StepTimer(), is_last=True)


async def _save_in_turn(run: TrainingRun, training: TrainingProgress, timer: StepTimer, *, is_last: bool) -> None:
    """Save where that is due, with the policy on the device, which the engine has had since the refit."""
    turn = run.placement.policy_turn("weights", "optimizer")
    await save_if_due(run, training, timer, is_last=is_last, turn=turn)


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
    await report_validation(run, training.position.step, validation, timer)


def _may_overlap(run: TrainingRun, step: int) -> bool:
    """Return whether a validation after `step` may run beside the next step: there is one, and no stop is requested."""
    config = run.config.algorithm
    return config.val_overlap and step < config.max_num_steps and not run.interrupt.requested


def _begin_validation(run: TrainingRun, training: TrainingProgress) -> None:
    """Prepare the validation of the policy that the engine holds; `_join_validation` reports it.

    It starts with the next training, during which the engine has nothing to do; or at once where rollouts never end, in
    background collection, and where training needs the engine's device.
    """
    if run.validator is None:
        return
    may_start, timer = asyncio.Event(), StepTimer()
    if run.config.algorithm.background.enabled or run.placement.shares_device:
        may_start.set()
    result = asyncio.create_task(_validate_once(may_start, run.validator, timer))
    training.running_validation = RunningValidation(training.position.step, may_start, result, timer)


async def _validate_once(may_start: asyncio.Event, validator: Validator, timer: StepTimer) -> ValidationResult:
    await may_start.wait()
    with timer("total_validation_time"):
        return await validator.validate()


async def _join_validation(run: TrainingRun, training: TrainingProgress, timer: StepTimer) -> None:
    """Wait for the running validation, if any, report it, and complete its step's checkpoint with its metrics.

    A stop request discards it. `timer` measures the wait.
    """
    if (running := training.running_validation) is None:
        return
    running.may_start.set()
    try:
        with timer("total_validation_time"):
            if not running.result.done():
                await run.interrupt.guard(_wait_for(running.result))
    except Interrupted:
        await _discard_validation(training)
        return
    training.running_validation = None
    validation = running.result.result()
    training.validations[running.step] = validation.metrics
    training.checkpoint_writer.add_metrics(running.step, _prefix_validation(validation.metrics))
    await report_validation(run, running.step, validation, running.timer)


async def _wait_for(task: asyncio.Task[ValidationResult]) -> None:
    await asyncio.wait((task,))


async def _discard_validation(training: TrainingProgress) -> None:
    """Cancel the running validation, if any; log the error of one that has failed."""
    if (running := training.running_validation) is None:
        return
    training.running_validation = None
    if running.result.done() and not running.result.cancelled() and (error := running.result.exception()) is not None:
        logger.error("the validation after step %d failed", running.step, exc_info=error)
        return
    logger.info("discarding the validation after step %d: the run stops", running.step)
    await cancel_all((running.result,))


async def save_if_due(
    run: Resumable,
    training: TrainingProgress,
    timer: StepTimer,
    *,
    is_last: bool,
    turn: AbstractAsyncContextManager[None] | None = None,
) -> None:
    """Begin a checkpoint where one is due; finish it now after the last step or past the deadline, else later.

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
    return {f"train:{k}": v for k, v in training.metrics.items()} | _prefix_validation(validation_metrics)


def _prefix_validation(metrics: dict[str, float]) -> dict[str, float]:
    return {f"val:{name}": value for name, value in metrics.items()}


class ReportTarget(Protocol):
    """A run that reports its steps."""

    @property
    def logger(self) -> Logger: ...

    @property
    def progress(self) -> Progress: ...


def report_step(run: ReportTarget, step: int, metrics: dict[str, float], timer: StepTimer) -> None:
    """Log the metrics of one training step under their prefixes, and show them."""
    seconds = timer.seconds()
    validation_s = seconds.pop("total_validation_time", 0.0)
    performance = throughput(metrics, seconds, validation_s)
    run.logger.log_metrics(
        {_add_train_prefix(name): value for name, value in metrics.items() if name != "train_flops"}
        | {f"efficiency/{name}": value for name, value in efficiency(seconds, validation_s).items()}
        | {f"timing/train/{name}": value for name, value in seconds.items()}
        | {f"performance/{name}": value for name, value in performance.items()},
        step,
    )
    run.progress.step(step, metrics=metrics | performance, seconds=seconds)


def _add_train_prefix(name: str) -> str:
    """Return the metric's full name; a background source reports waits, which have a prefix of their own."""
    return name if name.startswith("efficiency/") else f"train/{name}"


def efficiency(seconds: dict[str, float], validation_s: float) -> dict[str, float]:
    """Return the share of a step in which the policy computed, and the seconds in which it waited, by cause."""
    busy_s = sum(seconds.get(name, 0.0) for name in POLICY_PHASES)
    waits = {cause: sum(seconds.get(name, 0.0) for name in names) for cause, names in WAITING_PHASES.items()}
    waits["validation"] = validation_s
    shares = {"training_busy_pct": 100 * busy_s / max(seconds["total_step_time"], 1e-9)}
    return shares | {f"exposed_wait_s/{cause}": waited for cause, waited in waits.items()}


def throughput(metrics: dict[str, float], seconds: dict[str, float], validation_s: float) -> dict[str, float]:
    """Return the rates of one step, without the time of its validation."""
    total = max(seconds["total_step_time"] - validation_s, 1e-9)
    num_tokens = metrics["total_num_tokens"]
    rates = {
        "samples_per_sec": metrics["global_valid_seqs"] / total,
        "tokens_per_sec": num_tokens / total,
        "policy_training_tokens_per_sec": num_tokens / max(seconds["policy_training"], 1e-9),
    }
    if "num_rollouts" in metrics:
        generation_s = seconds.get("generation", total)  # in the background it takes the whole step
        rates["generation_tokens_per_sec"] = _num_sampled_tokens(metrics) / max(generation_s, 1e-9)
    if "train_flops" in metrics:  # of the whole step, from the policy
        rates["train_flops"] = metrics["train_flops"] / max(seconds["policy_training"], 1e-9)
    return rates


def _num_sampled_tokens(metrics: dict[str, float]) -> float:
    """Return the sampled tokens of all rollouts that did not fail, also of those not trained on."""
    num_failed = sum(metrics[f"failures/{failure_class}"] for failure_class in FailureClass)
    return metrics["mean_gen_tokens_per_sample"] * (metrics["num_rollouts"] - num_failed)


async def report_validation(run: TrainingRun, step: int, validation: ValidationResult, timer: StepTimer) -> None:
    """Log the metrics of one validation and its first rollouts as a table; write all rollouts to a file."""
    metrics = {f"validation/{name}": value for name, value in validation.metrics.items()}
    metrics["timing/validation/total_validation_time"] = timer.seconds()["total_validation_time"]
    run.logger.log_metrics(metrics, step)
    if run.validation_rollouts is not None:
        await run.validation_rollouts.write(step, validation.trajectories)
    rows = sample_rows(validation.trajectories[: run.config.logger.num_val_samples_to_print])
    run.logger.log_table("validation/samples", SAMPLE_COLUMNS, rows, step)
    run.progress.validation(step, metrics=validation.metrics, columns=SAMPLE_COLUMNS, rows=rows)


def sample_rows(trajectories: Sequence[Trajectory]) -> list[tuple[str, str, str, str]]:
    """Return one row for each rollout, as SAMPLE_COLUMNS; a failed one has its cause in place of a reward."""
    rows = []
    for trajectory in trajectories:
        prompt = "\n".join(message.content for message in trajectory.prompt.messages)
        turns = [m.message for m in trajectory.message_log[len(trajectory.prompt.messages) :]]
        response = "\n".join(f"{m.role}: {m.content}" if len(turns) > 1 else m.content for m in turns)
        failure = trajectory.failure
        reward = f"failed: {failure.cause}" if failure else f"{trajectory.reward:.3f}"
        rows.append((prompt, response, reward, str(trajectory.stop_reason)))
    return rows
