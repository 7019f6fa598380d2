"""The stages of an algorithm between rollouts and optimizer: their protocols, and the batch that they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.experience.assembly import BatchRow
from nemo_rl.interfaces import LossFn
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import CollectedGroups, TrainingBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch of a step with every key that the loss reads."""

    batch: TrainingBatch
    rows: tuple[BatchRow, ...]  # the origin of each row of the batch
    metrics: dict[str, float]  # metrics of the batch and the rollouts


class Algorithm(Protocol):
    """The stages of one algorithm between rollouts and optimizer (grpo.py, distillation.py)."""

    @property
    def loss_fn(self) -> LossFn: ...

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> StepBatch:
        """Leave the device to training. Raises RolloutError if no rollout is left to train on."""
        ...


class TeacherStage(Protocol):
    """Queries teachers and adds, in place, the keys of a batch that its loss or advantages read."""

    async def __call__(self, batch: TrainingBatch, rows: Sequence[BatchRow]) -> dict[str, float]:
        """Return metrics of the step; `rows` has one item for each row of the batch."""
        ...
