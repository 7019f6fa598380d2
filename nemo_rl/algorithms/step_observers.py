"""Observers of the training loop: work beside a step, at named points of it.

Each point calls all observers in the order of `loop.make_observers`. The validation's is validation_observer.py.
"""

import logging

from nemo_rl.algorithms.stages import StepBatch
from nemo_rl.algorithms.training_progress import TrainingProgress, save_if_due
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.config.policy import RolloutPolicyConfig
from nemo_rl.experience.rollout_details import RolloutDetails
from nemo_rl.observability.loggers import StepTimer

logger = logging.getLogger(__name__)

MUCH_TRUNCATED = 0.3  # share of a step's responses


class StepObserver:
    """An observer that does nothing; subclasses override the points that they need."""

    async def at_start(self) -> None:
        """Run once the engine holds the weights that training starts from."""

    async def after_collection(self, timer: StepTimer) -> None:
        """Run when the rollouts of a step are there."""

    async def before_training(self, made: StepBatch, timer: StepTimer) -> None:
        """Run when the batch of a step is complete."""

    async def after_training(self, made: StepBatch, timer: StepTimer) -> None:
        """Run after the optimizer step, which the progress already counts."""

    async def after_refit(self, timer: StepTimer, *, refit_done: bool) -> None:
        """Run after the refit, or after a requested stop skipped it."""

    async def at_step_end(self) -> None:
        """Run last in a step."""

    async def at_data_end(self) -> None:
        """Run after the last step of a run whose dataset is exhausted before `max_num_steps`."""

    async def at_exit(self) -> None:
        """Run when the loop ends, after an error too."""


class TruncationObserver(StepObserver):
    """Warns once, with the limits, if many responses are cut off."""

    def __init__(self, run: TrainingRun, training: TrainingProgress) -> None:
        self._policy = run.config.policy
        self._training = training
        self._has_warned = False

    async def at_step_end(self) -> None:
        """Compare the share of the step."""
        share = self._training.metrics.get("truncation_rate", 0.0)
        if self._has_warned or share <= MUCH_TRUNCATED:
            return
        self._has_warned = True
        logger.warning(
            "%.0f%% of the responses of step %d were cut off: %s",
            100 * share, self._training.position.step, describe_limits(self._policy),
        )  # fmt: skip


def describe_limits(policy: RolloutPolicyConfig) -> str:
    """Return the limits of a response, with their keys."""
    total = f"policy.max_total_sequence_length = {policy.max_total_sequence_length}"
    new = policy.generation.max_new_tokens
    return total if new is None else f"policy.generation.max_new_tokens = {new}, {total}"


class DetailsObserver(StepObserver):
    """Records rollout details of each step."""

    def __init__(self, run: TrainingRun, training: TrainingProgress, details: RolloutDetails) -> None:
        self._policy = run.policy
        self._training = training
        self._details = details

    async def before_training(self, made: StepBatch, timer: StepTimer) -> None:
        """Choose the rows whose log-probs the policy keeps."""
        self._details.mark(self._training.position.step + 1, made.batch)

    async def after_training(self, made: StepBatch, timer: StepTimer) -> None:
        with timer("rollout_details"):
            await self._details.record(self._training.position.step, made.batch, made.rows, self._policy)


class CheckpointObserver(StepObserver):
    """Begins checkpoints if they are due and completes those that are pending."""

    def __init__(self, run: TrainingRun, training: TrainingProgress) -> None:
        self._run = run
        self._training = training

    async def before_training(self, made: StepBatch, timer: StepTimer) -> None:
        """Complete a pending checkpoint that is written, so that a crash in training costs this step alone."""
        if self._training.checkpoint_writer.has_pending and self._training.running_validation is None:
            with timer("checkpointing"):
                await self._training.checkpoint_writer.finish_if_written()

    async def after_training(self, made: StepBatch, timer: StepTimer) -> None:
        if self._training.checkpoint_writer.has_pending:
            with timer("checkpointing"):
                await self._training.checkpoint_writer.finish()

    async def after_refit(self, timer: StepTimer, *, refit_done: bool) -> None:
        """Begin a checkpoint if one is due."""
        is_last = self._training.position.step == self._run.config.algorithm.max_num_steps
        await self._save_if_due(timer, is_last=is_last)

    async def at_data_end(self) -> None:
        """Save as after a last step."""
        await self._save_if_due(StepTimer(), is_last=True)

    async def _save_if_due(self, timer: StepTimer, *, is_last: bool) -> None:
        """Save with the policy on the device, which the engine has had since the refit."""
        turn = self._run.placement.policy_turn("weights", "optimizer")
        await save_if_due(self._run, self._training, timer, is_last=is_last, turn=turn)
