"""Advantage estimators: from the rewards of a batch, or from its teachers' log-probs, to one advantage per token."""

import logging
from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.config.algorithm import AdvantageEstimatorConfig
from nemo_rl.config.loss import LossConfig
from nemo_rl.interfaces import AdvantageEstimator
from nemo_rl.losses.terms import kl_estimate
from nemo_rl.types import TrainingBatch, TrajectoryGroup

logger = logging.getLogger(__name__)

RELATIVE_STD_TOLERANCE = 1e-6  # a deviation below this share of the largest magnitude is rounding
STD_EPSILON = 1e-6


def baseline_and_std(
    rewards: torch.Tensor, group: torch.Tensor, *, leave_one_out: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased std of the group of each reward, or of its others with `leave_one_out`: [N] float64 each.

    `group` [N] counts from 0 without gaps. Where no other reward exists the mean is the reward itself; the std is 0
    where fewer than two rewards define it, and where it is zero but for rounding.

    Example: leave-one-out of one group [1, 2, 3]: means [2.5, 2, 1.5], stds [.7071, 1.4142, .7071].
    """
    rewards = rewards.double()
    counts = torch.bincount(group)  # [P]
    order = torch.argsort(group, stable=True)
    starts = counts.cumsum(0) - counts
    index_in_group = torch.empty_like(group)
    index_in_group[order] = torch.arange(len(group), device=group.device) - starts[group[order]]

    size = int(counts.max())
    table = rewards.new_zeros(len(counts), size)  # [P, G]
    table[group, index_in_group] = rewards
    peers = torch.arange(size, device=group.device) < counts[:, None, None]  # [P, 1, G]
    if leave_one_out:
        peers = peers & ~torch.eye(size, dtype=torch.bool, device=group.device)  # [P, G, G]
    num_peers = peers.sum(-1)
    mean = (table[:, None] * peers).sum(-1) / num_peers.clamp(min=1)
    squares = ((table[:, None] - mean[..., None]).square() * peers).sum(-1)
    std = (squares / (num_peers - 1).clamp(min=1)).sqrt()
    std = torch.where(is_rounding_error(std, table.abs().amax(-1, keepdim=True)), 0.0, std)
    baseline = torch.where(num_peers > 0, mean, table)
    return baseline[group, index_in_group], std.expand_as(table)[group, index_in_group]


def unbiased_std(values: torch.Tensor) -> torch.Tensor:
    """Of [N] values; a scalar, 0 for fewer than two and where it is zero but for rounding."""
    if len(values) < 2:
        return values.new_zeros(())
    std = (values - values.mean()).square().sum().div(len(values) - 1).sqrt()
    return torch.where(is_rounding_error(std, values.abs().max()), 0.0, std)


def divide_by_std(centred: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """centred / (std + 1e-6), or `centred` itself where the std is 0."""
    return torch.where(std > 0, centred / (std + STD_EPSILON), centred)


def is_rounding_error(std: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Whether a std is zero relative to the largest magnitude of what it was computed from."""
    return std <= RELATIVE_STD_TOLERANCE * magnitude


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


def is_informative(group: TrajectoryGroup) -> bool:
    """Whether the raw rewards of the group's survivors differ by more than rounding; one alone never does."""
    rewards = torch.tensor([t.reward for t in group.survivors], dtype=torch.float64)
    return bool(unbiased_std(rewards) > 0)
