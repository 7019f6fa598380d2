"""Everything that one training run is made of; launch/training.py makes it, loop.py uses it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.validation import Validator
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import CollectedGroups, Generation, GroupSource, Logger, LossFn, Policy, WeightSync
from nemo_rl.observability.progress import Progress
from nemo_rl.observability.timer import StepTimer
from nemo_rl.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class Placement:
    """Device sharing: calls sleep, wake, offload and onload around generation and training; no-ops without sharing.

    A run begins with both models on the device. In every step: `prepare_for_training`, train, `prepare_for_refit`,
    publish, `prepare_for_generation`, generate.
    """

    policy: Policy
    generation: Generation
    shares_device: bool
    teachers_share_device: bool = False  # some teacher shares the policy's device

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """Put the engine to sleep while reward models score inside the block."""
        if self.shares_device:
            await self.generation.sleep()
        try:
            yield
        finally:
            if self.shares_device:
                await self.generation.wake()

    @asynccontextmanager
    async def teacher_phase(self) -> AsyncIterator[None]:
        """Clear the device for teachers inside the block, then load the policy for training."""
        if self.shares_device:
            await self.generation.sleep()
        elif self.teachers_share_device:
            await self.policy.offload()
        try:
            yield
        finally:
            if self.shares_device or self.teachers_share_device:
                await self.policy.onload()

    async def prepare_for_training(self) -> None:
        """Put the engine to sleep, then load the policy."""
        if self.shares_device:
            await self.generation.sleep()
            await self.policy.onload()

    async def prepare_for_refit(self) -> None:
        """Wake the engine to receive weights, while the policy is still loaded."""
        if self.shares_device:
            await self.generation.wake()

    async def prepare_for_generation(self) -> None:
        """Offload the policy, so that the engine has the device."""
        if self.shares_device:
            await self.policy.offload()


class Algorithm(Protocol):
    """The stages of one algorithm between rollouts and optimizer (grpo.py, distillation.py)."""

    @property
    def loss_fn(self) -> LossFn: ...

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> tuple[TrainingBatch, dict[str, float]]:
        """Return the batch with every key that the loss reads, and metrics of it and of the rollouts.

        Leaves the device to training. Raises RolloutError where no rollout is left to train on.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The parts of one run on rollouts."""

    config: TrainingRunConfig
    run_dir: Path
    num_steps: int  # at most: max_num_steps, or what the data allows
    algorithm: Algorithm
    source: GroupSource
    generation: Generation
    policy: Policy
    placement: Placement
    weight_sync: WeightSync
    validator: Validator | None
    checkpoints: CheckpointStore | None
    logger: Logger
    progress: Progress
    validation_rollouts: RolloutWriter | None
    interrupt: Interrupt

    @property
    def generation_phase(self) -> str:
        """Return the timer's name for the wait for rollouts."""
        return "exposed_generation" if self.config.algorithm.background.enabled else "generation"
