"""Everything that one training run is made of; build/ makes it, loop.py uses it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.validation import Validator
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import CollectedGroups, Generation, GroupSource, Logger, LossFn, Policy, WeightSync
from nemo_rl.observability.progress import Progress
from nemo_rl.observability.timer import StepTimer
from nemo_rl.types import TrainingBatch


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
