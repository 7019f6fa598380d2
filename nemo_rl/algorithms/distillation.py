"""On-policy distillation: the student samples, teachers score its samples, the loss compares the two.

Also of responses that were recorded: they come from another source (experience/recorded_responses.py), and nothing
here knows of it.
"""

from dataclasses import dataclass

from nemo_rl.algorithms.metrics import batch_metrics
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.teachers import TeacherStage, rows_in_batch_order
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.interfaces import CollectedGroups, LossFn
from nemo_rl.observability.timer import StepTimer
from nemo_rl.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class Distillation:
    """The stages of a step in their order; satisfies run.Algorithm."""

    config: DistillationRunConfig
    loss_fn: LossFn
    teacher_stage: TeacherStage
    placement: Placement

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> tuple[TrainingBatch, dict[str, float]]:
        min_group_size = self.config.min_group_size
        with timer("data_processing"):
            batch = assemble_batch(collected.groups, min_group_size=min_group_size)
            rows = rows_in_batch_order(collected.groups, min_group_size=min_group_size)
        with timer("teacher_logprobs"):
            async with self.placement.teacher_phase():
                metrics = await self.teacher_stage(batch, rows)
        batch_level_metrics = batch_metrics(batch)
        if self.config.distillation.off_policy:  # nobody scores what was recorded
            batch_level_metrics = {name: value for name, value in batch_level_metrics.items() if "reward" not in name}
        return batch, {**batch_level_metrics, **metrics, **collected.metrics}
