"""Everything that one training run is made of; build/ makes it, loop.py uses it."""

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
    """Calls sleep, wake, offload and onload around generation and training; nothing where nothing is shared.

    A run begins with both on the device. In every step: `prepare_for_training`, train, `prepare_for_refit`, publish,
    `prepare_for_generation`, generate.
    """

    policy: Policy
    generation: Generation
    shares_device: bool
    teachers_share_device: bool = False  # some teacher computes where the policy does

    @asynccontextmanager
    async def scoring(self) -> AsyncIterator[None]:
        """The engine gives up its memory to reward models that score inside, and takes it back."""
        if self.shares_device:
            await self.generation.sleep()
        try:
            yield
        finally:
            if self.shares_device:
                await self.generation.wake()

    @asynccontextmanager
    async def teacher_phase(self) -> AsyncIterator[None]:
        """`prepare_for_training` with time between: inside, neither engine nor policy is on the device."""
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
        """The engine gives up its memory, then the policy takes its place."""
        if self.shares_device:
            await self.generation.sleep()
            await self.policy.onload()

    async def prepare_for_refit(self) -> None:
        """The engine is there to take weights, which the policy still holds."""
        if self.shares_device:
            await self.generation.wake()

    async def prepare_for_generation(self) -> None:
        """The policy leaves the device to the engine."""
        if self.shares_device:
            await self.policy.offload()


class Algorithm(Protocol):
    """What one algorithm does between rollouts and optimizer (grpo.py, distillation.py)."""

    @property
    def loss_fn(self) -> LossFn: ...

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> tuple[TrainingBatch, dict[str, float]]:
        """The batch with every key that the loss reads, and metrics of it and of the rollouts.

        The device belongs to training behind it. Raises RolloutError where no rollout is left to train on.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainingRun:
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
        """The name of the time that the trainer waits for rollouts."""
        return "exposed_generation" if self.config.algorithm.background.enabled else "generation"
