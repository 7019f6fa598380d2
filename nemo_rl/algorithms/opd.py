"""Multi-teacher on-policy distillation as an advantage: what the teacher of a task says of each sampled token."""

from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class TeacherAdvantages:
    """A = lp_teacher - lp_prev of each token, without a gradient; satisfies interfaces.AdvantageEstimator.

    Its expectation under the policy is minus the reverse KL to the teacher, so the policy gradient lowers that; rewards
    are not read. Clipping is of each token's.
    """

    clip_low: float | None = None
    clip_high: float | None = None

    @property
    def required_keys(self) -> frozenset[str]:
        return frozenset({keys.PREV_LOGPROBS, keys.TEACHER_LOGPROBS})

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        advantages = batch[keys.TEACHER_LOGPROBS] - batch[keys.PREV_LOGPROBS]
        if self.clip_low is not None or self.clip_high is not None:
            advantages = advantages.clamp(self.clip_low, self.clip_high)
        return advantages.float()
