"""Rewards become advantages: one number a trajectory, laid over its tokens.

A trajectory counts once in every baseline, deviation and mean over trajectories, however many samples it yields.
Sums are taken in float64 and in two passes, so that nearly equal rewards do not explode.
"""

import logging
from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.group_statistics import baseline_and_std, divide_by_std, unbiased_std
from nemo_rl.algorithms.kl import kl_estimate
from nemo_rl.algorithms.opd import TeacherAdvantages
from nemo_rl.config.algorithm import AdvantageEstimatorConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.interfaces import AdvantageEstimator
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

MIN_TOKEN_VARIANCE = 1e-8  # of reinforce_plus_plus's whitening


def make_advantage_estimator(
    adv: AdvantageEstimatorConfig, loss: LossConfig, *, clip_low: float | None = None, clip_high: float | None = None
) -> AdvantageEstimator:
    """The estimator of `grpo.adv_estimator`; the bounds are `grpo.advantage_clip_low` and `advantage_clip_high`."""
    if adv.name == "opd":
        return TeacherAdvantages(clip_low, clip_high)
    return RewardAdvantages(adv, loss, clip_low, clip_high)


@dataclass(frozen=True, slots=True)
class RewardAdvantages:
    """Advantages from the rewards of a batch.

    - grpo (arXiv 2402.03300): A = r - baseline, over the group's deviation with `normalize_rewards`;
    - gdpo (arXiv 2601.05242): that of each reward component, weighted and summed, then whitened over trajectories;
    - reinforce_plus_plus (arXiv 2501.03262): r - group mean, then whitened over the valid tokens.

    With `loss_fn.use_kl_in_reward`, reference_policy_kl_penalty * KL(prev, reference) of each token is subtracted, for
    reinforce_plus_plus before the whitening, for the others at the end. Clipping comes last.
    """

    adv: AdvantageEstimatorConfig
    loss: LossConfig
    clip_low: float | None = None
    clip_high: float | None = None

    @property
    def required_keys(self) -> frozenset[str]:
        required = {keys.TOKEN_MASK, keys.TRAJECTORY_ID, keys.GROUP_ID}
        required.add(keys.REWARD_COMPONENTS if self.adv.name == "gdpo" else keys.REWARD)
        if self.adv.name == "reinforce_plus_plus":
            required.add(keys.SAMPLE_MASK)
        if self._kl_in_reward:
            required |= {keys.PREV_LOGPROBS, keys.REFERENCE_LOGPROBS}
        return frozenset(required)

    @property
    def _kl_in_reward(self) -> bool:
        return self.loss.use_kl_in_reward and self.loss.reference_policy_kl_penalty > 0

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        trajectories = TrajectoryIndex.of(batch)
        trajectory_advantages = self._trajectory_advantages(trajectories)  # [N]
        advantages = trajectory_advantages[trajectories.trajectory_index][:, None].expand_as(
            batch[keys.TOKEN_MASK]
        )  # [B, T]
        if self._kl_in_reward:
            kl = kl_estimate(batch[keys.PREV_LOGPROBS], batch[keys.REFERENCE_LOGPROBS], self.loss)
            advantages = advantages - self.loss.reference_policy_kl_penalty * kl
        if self.adv.name == "reinforce_plus_plus":
            advantages = whiten_tokens(advantages, batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK][:, None])
        if self.clip_low is not None or self.clip_high is not None:
            advantages = advantages.clamp(self.clip_low, self.clip_high)
        return advantages.float().contiguous()

    def _trajectory_advantages(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        if self.adv.name == "gdpo":
            return self._gdpo(trajectories)
        rewards = trajectories.first(keys.REWARD)
        if self.adv.name == "grpo":
            return self._group_relative(rewards, trajectories.group)
        if not self.adv.minus_baseline:
            return rewards
        baseline, _ = baseline_and_std(rewards, trajectories.group, leave_one_out=False)
        return rewards - baseline

    def _group_relative(self, rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Each reward relative to its group's: [N]."""
        baseline, std = baseline_and_std(rewards, group, leave_one_out=self.adv.use_leave_one_out_baseline)
        advantages = rewards - baseline
        return divide_by_std(advantages, std) if self.adv.normalize_rewards else advantages

    def _gdpo(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        names = sorted(str(name) for name, _ in trajectories.batch[keys.REWARD_COMPONENTS].items())
        if absent := sorted(set(self.adv.reward_weights) - set(names)):
            logger.warning("no reward of this batch is named %s, of adv_estimator.reward_weights", ", ".join(absent))
        total = torch.zeros(len(trajectories.group), dtype=torch.float64, device=trajectories.group.device)
        for name in names:
            relative = self._group_relative(trajectories.first((keys.REWARD_COMPONENTS, name)), trajectories.group)
            total += self.adv.reward_weights.get(name, 1.0) * relative
        return divide_by_std(total - total.mean(), unbiased_std(total))


@dataclass(frozen=True, slots=True)
class TrajectoryIndex:
    """The trajectories of a batch, N of them, each seen through its first sample."""

    batch: TrainingBatch
    trajectory_index: torch.Tensor  # [B]: the trajectory of each sample, 0..N-1
    first_sample: torch.Tensor  # [N]
    group: torch.Tensor  # [N]: 0..P-1

    @classmethod
    def of(cls, batch: TrainingBatch) -> "TrajectoryIndex":
        ids, trajectory_index = torch.unique(batch[keys.TRAJECTORY_ID], return_inverse=True)
        rows = torch.arange(len(trajectory_index), device=trajectory_index.device)
        first_sample = torch.full_like(ids, len(trajectory_index)).scatter_reduce_(0, trajectory_index, rows, "amin")
        _, group = torch.unique(batch[keys.GROUP_ID][first_sample], return_inverse=True)
        return cls(batch, trajectory_index, first_sample, group)

    def first(self, key: str | tuple[str, str]) -> torch.Tensor:
        """A [B] entry of the batch, one value a trajectory: [N] float64."""
        return self.batch[key][self.first_sample].double()


def whiten_tokens(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and (biased) variance 1 over the tokens where the mask is 1; all [B, T]."""
    values = torch.where(mask > 0, advantages, 0.0).double()
    count = mask.sum().clamp(min=1)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) * variance.clamp(min=MIN_TOKEN_VARIANCE).rsqrt()
