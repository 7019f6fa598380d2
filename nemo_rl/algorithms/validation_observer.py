"""When a run validates: at the start, each period and at the end, before the next step or overlapping it.

With `val_overlap` a validation begins after a step's save and ends before the next refit, at the latest.
"""

import asyncio
import logging

from nemo_rl.algorithms.interrupt import Interrupted
from nemo_rl.algorithms.stages import StepBatch
from nemo_rl.algorithms.step_observers import StepObserver
from nemo_rl.algorithms.training_progress import RunningValidation, TrainingProgress, prefix_validation
from nemo_rl.algorithms.training_reports import report_validation
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.algorithms.validation import ValidationResult, Validator
from nemo_rl.experience.cancellation import cancel_all
from nemo_rl.observability.loggers import StepTimer

logger = logging.getLogger(__name__)


class ValidationObserver(StepObserver):
    """Validates if due. A stop request discards an unfinished validation."""

    def __init__(self, run: TrainingRun, training: TrainingProgress, validator: Validator) -> None:
        self._run = run
        self._training = training
        self._validator = validator
        self._begins_at_step_end = False

    async def at_start(self) -> None:
        """Validate before training."""
        if not self._run.config.algorithm.val_at_start or self._training.position.step > 0:
            return
        if self._may_overlap():
            self._begin()
        else:
            await self._validate(StepTimer())

    async def after_collection(self, timer: StepTimer) -> None:
        """Let the running validation start; report it if it has ended, and wait for it if training needs the device."""
        if running := self._training.running_validation:
            running.may_start.set()
            if running.result.done() or self._run.placement.shares_device:
                await self._join(timer)

    async def after_training(self, made: StepBatch, timer: StepTimer) -> None:
        """Wait for the running validation, since the refit comes next."""
        await self._join(timer)

    async def after_refit(self, timer: StepTimer, *, refit_done: bool) -> None:
        """Validate if that is due, or have it begin once the step is saved."""
        is_due = refit_done and self._is_due()
        self._begins_at_step_end = is_due and self._may_overlap()
        if is_due and not self._begins_at_step_end:
            await self._validate(timer)

    async def at_step_end(self) -> None:
        """Begin the validation that overlaps the next step."""
        if self._begins_at_step_end:
            self._begin()

    async def at_data_end(self) -> None:
        """Validate as after a last step."""
        await self._join(StepTimer())
        if self._run.config.algorithm.val_at_end and self._training.position.step not in self._training.validations:
            await self._validate(StepTimer())

    async def at_exit(self) -> None:
        await self._discard()

    def _is_due(self) -> bool:
        config, step = self._run.config.algorithm, self._training.position.step
        in_period = config.val_period > 0 and step % config.val_period == 0
        return in_period or (config.val_at_end and step == config.max_num_steps)

    def _may_overlap(self) -> bool:
        """Return whether a validation may run beside the next step: there is one, and no stop is requested."""
        config = self._run.config.algorithm
        has_next = self._training.position.step < config.max_num_steps
        return config.val_overlap and has_next and not self._run.interrupt.requested

    async def _validate(self, timer: StepTimer) -> None:
        step = self._training.position.step
        try:
            with timer("total_validation_time"):
                async with self._run.source.hold():
                    validation = await self._run.interrupt.guard(self._validator.validate())
        except Interrupted:
            logger.info("discarding the validation after step %d: a stop was requested", step)
            return
        self._training.validations[step] = validation.metrics
        await report_validation(self._run, step, validation, timer)

    def _begin(self) -> None:
        """Prepare the validation of the policy that the engine holds; `_join` reports it.

        It starts during the next training, when the engine is idle. It starts at once if rollouts never end, in
        background collection, and if training needs the engine's device.
        """
        may_start, timer = asyncio.Event(), StepTimer()
        if self._run.config.algorithm.background.enabled or self._run.placement.shares_device:
            may_start.set()
        result = asyncio.create_task(_validate_once(may_start, self._validator, timer))
        self._training.running_validation = RunningValidation(self._training.position.step, may_start, result, timer)

    async def _join(self, timer: StepTimer) -> None:
        """Wait for the running validation, report it, and complete its step's checkpoint with its metrics.

        `timer` measures the wait.
        """
        if (running := self._training.running_validation) is None:
            return
        running.may_start.set()
        try:
            with timer("total_validation_time"):
                if not running.result.done():
                    await self._run.interrupt.guard(_wait_for(running.result))
        except Interrupted:
            await self._discard()
            return
        self._training.running_validation = None
        validation = running.result.result()
        self._training.validations[running.step] = validation.metrics
        self._training.checkpoint_writer.add_metrics(running.step, prefix_validation(validation.metrics))
        await report_validation(self._run, running.step, validation, running.timer)

    async def _discard(self) -> None:
        """Cancel the running validation, if any; log the error of one that has failed."""
        if (running := self._training.running_validation) is None:
            return
        self._training.running_validation = None
        result = running.result
        if result.done() and not result.cancelled() and (error := result.exception()) is not None:
            logger.error("the validation after step %d failed", running.step, exc_info=error)
            return
        logger.info("discarding the validation after step %d: the run stops", running.step)
        await cancel_all((result,))


async def _validate_once(may_start: asyncio.Event, validator: Validator, timer: StepTimer) -> ValidationResult:
    await may_start.wait()
    with timer("total_validation_time"):
        return await validator.validate()


async def _wait_for(task: asyncio.Task[ValidationResult]) -> None:
    await asyncio.wait((task,))
