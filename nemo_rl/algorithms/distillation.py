"""On-policy distillation: teachers score the student's samples, and the loss compares the two."""

from dataclasses import dataclass

from nemo_rl.algorithms.advantages import batch_metrics
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.stages import StepBatch, TeacherStage
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.interfaces import LossFn
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import CollectedGroups


@dataclass(frozen=True, slots=True)
class Distillation:
    """The stages of a step in their order; satisfies stages.Algorithm."""

    config: DistillationRunConfig
    loss_fn: LossFn
    teacher_stage: TeacherStage
    placement: Placement

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> StepBatch:
        """Return the batch with the teachers' log-probs."""
        with timer("data_processing"):
            batch, rows = assemble_batch(collected.groups, min_group_size=self.config.min_group_size)
        with timer("teacher_logprobs"):
            async with self.placement.teacher_phase():
                metrics = await self.teacher_stage(batch, rows)
        batch_level_metrics = batch_metrics(batch)
        if self.config.distillation.off_policy:  # recorded responses have no reward
            batch_level_metrics = {name: value for name, value in batch_level_metrics.items() if "reward" not in name}
        return StepBatch(batch, rows, {**batch_level_metrics, **metrics, **collected.metrics})
