"""GRPO and its relatives: rewards of groups become advantages, then a policy-gradient loss."""

from dataclasses import dataclass

from nemo_rl.algorithms.distillation import TeacherStage
from nemo_rl.algorithms.rewards import Penalties
from nemo_rl.algorithms.run import Placement
from nemo_rl.algorithms.stages import (
    RequiredLogprobs,
    add_logprobs,
    assemble_train_batch,
    compute_train_rewards,
    estimate_advantages,
)
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.interfaces import AdvantageEstimator, CollectedGroups, LossFn, Policy
from nemo_rl.observability.timer import StepTimer
from nemo_rl.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class GRPO:
    """The stages of a step in their order; satisfies run.Algorithm."""

    config: GRPORunConfig
    loss_fn: LossFn
    advantage_estimator: AdvantageEstimator
    required_logprobs: RequiredLogprobs
    policy: Policy
    placement: Placement
    teacher_stage: TeacherStage | None = None  # where the advantages read teachers
    penalties: Penalties | None = None  # for faulty replies

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> tuple[TrainingBatch, dict[str, float]]:
        """Return the batch with advantages, and its metrics."""
        with timer("reward_calculation"):
            rewards = compute_train_rewards(self.config, self.penalties, collected)
        with timer("data_processing"):
            batch, rows = assemble_train_batch(self.config, collected, rewards)
        if self.teacher_stage is not None:
            with timer("teacher_logprobs"):
                async with self.placement.teacher_phase():
                    await self.teacher_stage(batch, rows)
        with timer("policy_and_reference_logprobs"):
            if self.teacher_stage is None:
                await self.placement.prepare_for_training()
            await add_logprobs(batch, self.policy, self.required_logprobs)
        with timer("advantage_calculation"):
            metrics = estimate_advantages(self.config, self.advantage_estimator, batch)
        return batch, {**metrics, **rewards.faults.metrics, **collected.metrics}
