"""Advantages of a batch's tokens, from its rewards or its teachers' log-probs; estimators.py names the estimators.

B samples, T tokens, N trajectories, P groups. Formulas: docs/losses.md.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.errors import ConfigError
from nemo_rl.losses.policy_gradient import kl_estimate
from nemo_rl.types import TrainingBatch, TrajectoryGroup

logger = logging.getLogger(__name__)

RELATIVE_STD_TOLERANCE = 1e-6  # a deviation below this share of the largest magnitude is rounding
CANCELLATION_TOLERANCE = 1e-4  # the same for a sum of normalised rewards, to which STD_EPSILON adds an error
STD_EPSILON = 1e-6
MIN_STD_SHARE = 0.5  # leave-one-out: lower bound of the others' deviation, as a share of the group's
MIN_TOKEN_VARIANCE = 1e-8  # lower bound when tokens are whitened


class RewardAdvantages(ABC):
    """Advantages from rewards: one of each trajectory, less the KL of each token if it belongs to the reward."""

    def __init__(self, reward_kl: PolicyGradientLossConfig | None = None) -> None:
        """Subtract `reference_policy_kl_penalty * KL(prev, reference)` of each token, given `reward_kl`."""
        self._reward_kl = reward_kl

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the reward and the ids of trajectories and groups; log-probs for a KL in the reward."""
        logprobs = {keys.PREV_LOGPROBS, keys.REFERENCE_LOGPROBS} if self._reward_kl is not None else set()
        return frozenset({keys.TOKEN_MASK, keys.TRAJECTORY_ID, keys.GROUP_ID, keys.REWARD} | logprobs)

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        trajectories = TrajectoryIndex.of(batch, self.rewards_of(batch))
        of_samples = self.estimate(trajectories)[trajectories.trajectory_index]  # [B]
        advantages = of_samples[:, None].expand_as(batch[keys.TOKEN_MASK])  # [B, T]
        if self._reward_kl is not None:
            kl = kl_estimate(batch[keys.PREV_LOGPROBS], batch[keys.REFERENCE_LOGPROBS], self._reward_kl)
            advantages = advantages - self._reward_kl.reference_policy_kl_penalty * kl
        return self.normalize_tokens(advantages, batch).float().contiguous()

    def rewards_of(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """Return the rewards that are compared, [B] by name: those by which chains of a trajectory are told apart."""
        return {"": batch[keys.REWARD]}

    @abstractmethod
    def estimate(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        """Return the advantage of each trajectory: [N] float64."""

    def normalize_tokens(self, advantages: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
        """Return the advantages [B, T] normalised over the batch; here as they are."""
        return advantages


class GroupRelativeAdvantages(RewardAdvantages):
    """A = r - baseline of the group, over a deviation with `normalize` (GRPO, arXiv 2402.03300).

    The deviation is the group's, or with `batch_std` that of all rewards.
    """

    def __init__(
        self,
        reward_kl: PolicyGradientLossConfig | None = None,
        *,
        leave_one_out: bool = False,
        normalize: bool = True,
        std_epsilon: float = STD_EPSILON,
        min_std_share: float = MIN_STD_SHARE,
        batch_std: bool = False,
    ) -> None:
        super().__init__(reward_kl)
        self._leave_one_out = leave_one_out
        self._min_std_share = min_std_share
        self._normalize = normalize
        self._std_epsilon = std_epsilon
        self._batch_std = batch_std

    def estimate(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        return self.compare(trajectories.first(keys.REWARD), trajectories.group)

    def compare(self, rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Return each of the rewards [N] relative to its group."""
        baseline, std = baseline_and_std(
            rewards, group, leave_one_out=self._leave_one_out, min_std_share=self._min_std_share
        )
        advantages = rewards - baseline
        if not self._normalize:
            return advantages
        return divide_by_std(advantages, unbiased_std(rewards) if self._batch_std else std, self._std_epsilon)


class DecoupledAdvantages(GroupRelativeAdvantages):
    """A = the weighted sum of each named reward's group-relative advantage, whitened over trajectories (GDPO)."""

    def __init__(
        self,
        reward_kl: PolicyGradientLossConfig | None = None,
        *,
        leave_one_out: bool = False,
        normalize: bool = True,
        std_epsilon: float = STD_EPSILON,
        min_std_share: float = MIN_STD_SHARE,
        reward_weights: Mapping[str, float] | Sequence[float] | None = None,
    ) -> None:
        """Weigh rewards (arXiv 2601.05242) by name, 1 if not named, or in the alphabetical order of all names."""
        super().__init__(
            reward_kl,
            leave_one_out=leave_one_out,
            normalize=normalize,
            std_epsilon=std_epsilon,
            min_std_share=min_std_share,
        )
        self._reward_weights = reward_weights or {}

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the named rewards in place of their sum."""
        return super().required_keys - {keys.REWARD} | {keys.REWARD_COMPONENTS}

    def rewards_of(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        return {str(name): reward for name, reward in batch[keys.REWARD_COMPONENTS].items()}

    def estimate(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        """Return the whitened sum over the named rewards."""
        names = sorted(self.rewards_of(trajectories.batch))
        weights = self._reward_weights
        if not isinstance(weights, Mapping):
            if len(weights) != len(names):
                problem = f"must have one weight for each reward: {', '.join(names)}"
                raise ConfigError("grpo.adv_estimator.reward_weights", list(weights), problem)
            weights = dict(zip(names, weights, strict=True))
        if absent := sorted(set(weights) - set(names)):
            logger.warning("adv_estimator.reward_weights names %s, which no reward of this batch is", ", ".join(absent))
        total = torch.zeros(len(trajectories.group), dtype=torch.float64, device=trajectories.group.device)
        magnitude = total.new_zeros(())
        for name in names:
            relative = self.compare(trajectories.first((keys.REWARD_COMPONENTS, name)), trajectories.group)
            weighted = weights.get(name, 1.0) * relative
            total, magnitude = total + weighted, magnitude + weighted.abs().max()
        std = unbiased_std(total, magnitude, tolerance=CANCELLATION_TOLERANCE)  # terms that cancel leave rounding
        return divide_by_std(total - total.mean(), std)


class BestOfGroupAdvantages(GroupRelativeAdvantages):
    """A = r - the second-best reward for the best rollout of a group, 0 for the others: pass@k (arXiv 2503.19595)."""

    def compare(self, rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Return the advantages of rewards [N]; with `normalize` over the group's deviation.

        Example: rewards [1, 0, .25] give [.75, 0, 0], over .52042.
        """
        _, std = baseline_and_std(rewards, group, leave_one_out=False)
        by_reward = torch.argsort(rewards, descending=True, stable=True)
        order = by_reward[torch.argsort(group[by_reward], stable=True)]  # by group, the best first
        counts = torch.bincount(group)
        first = (counts.cumsum(0) - counts)[counts > 1]
        best, second = order[first], order[first + 1]
        advantages = torch.zeros_like(rewards).index_copy(0, best, rewards[best] - rewards[second])
        return divide_by_std(advantages, std, self._std_epsilon) if self._normalize else advantages


class LengthWeightedAdvantages(RewardAdvantages):
    """A = r - the mean of the group's rewards, weighted by the tokens of each rollout (OPO, arXiv 2505.23585)."""

    @property
    def required_keys(self) -> frozenset[str]:
        """Return also the number of tokens of each trajectory."""
        return super().required_keys | {keys.TRAJECTORY_TOKENS}

    def estimate(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        """Return each reward less its group's weighted mean.

        Example: rewards [1, 0] of 3 and 1 tokens: mean .75, advantages [.25, -.75].
        """
        rewards, lengths = trajectories.first(keys.REWARD), trajectories.first(keys.TRAJECTORY_TOKENS).clamp(min=1)
        group = trajectories.group
        zeros = rewards.new_zeros(int(group.max()) + 1)
        means = zeros.index_add(0, group, rewards * lengths) / zeros.index_add(0, group, lengths)
        return rewards - means[group]


class GreedyBaselineAdvantages(RewardAdvantages):
    """A = r - the reward of the prompt's greedy rollout (ReMax, arXiv 2310.10505)."""

    @property
    def required_keys(self) -> frozenset[str]:
        """Return also the greedy rollout's reward."""
        return super().required_keys | {keys.BASELINE_REWARD}

    def estimate(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        return trajectories.first(keys.REWARD) - trajectories.first(keys.BASELINE_REWARD)


class WhitenedAdvantages(RewardAdvantages):
    """A = r less its group's mean, then the KL subtracted and all whitened over the valid tokens (REINFORCE++)."""

    def __init__(self, reward_kl: PolicyGradientLossConfig | None = None, *, minus_baseline: bool = True) -> None:
        """Subtract the group's mean with `minus_baseline` (arXiv 2501.03262)."""
        super().__init__(reward_kl)
        self._minus_baseline = minus_baseline

    @property
    def required_keys(self) -> frozenset[str]:
        """Return also the samples' mask, which the whitening reads."""
        return super().required_keys | {keys.SAMPLE_MASK}

    def estimate(self, trajectories: "TrajectoryIndex") -> torch.Tensor:
        """Return the rewards, less their group's mean if asked."""
        rewards = trajectories.first(keys.REWARD)
        if not self._minus_baseline:
            return rewards
        baseline, _ = baseline_and_std(rewards, trajectories.group, leave_one_out=False)
        return rewards - baseline

    def normalize_tokens(self, advantages: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
        """Return the advantages [B, T] whitened over the tokens with a gradient."""
        return whiten_tokens(advantages, batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK][:, None])


class TeacherAdvantages:
    """A = lp_teacher - lp_prev of each token, without a gradient.

    Its expectation under the policy is minus the reverse KL to the teacher, so the policy gradient lowers that; rewards
    are not read.
    """

    @property
    def required_keys(self) -> frozenset[str]:
        """Return both models' log-probs."""
        return frozenset({keys.PREV_LOGPROBS, keys.TEACHER_LOGPROBS})

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> torch.Tensor:
        return (batch[keys.TEACHER_LOGPROBS] - batch[keys.PREV_LOGPROBS]).float()


def clip_advantages(advantages: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Return the advantages within the bounds, if there are any."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


@dataclass(frozen=True, slots=True)
class TrajectoryIndex:
    """The trajectories of a batch, N of them, each seen through its first sample.

    Chains of one trajectory with different rewards are compared as trajectories of their own.
    """

    batch: TrainingBatch
    trajectory_index: torch.Tensor  # [B]: the trajectory of each sample, 0..N-1
    first_sample: torch.Tensor  # [N]
    group: torch.Tensor  # [N]: 0..P-1

    @classmethod
    def of(cls, batch: TrainingBatch, rewards: Mapping[str, torch.Tensor]) -> "TrajectoryIndex":
        """Return the index of a batch; `rewards`, [B] each, tell chains of a trajectory apart."""
        columns = [batch[keys.TRAJECTORY_ID], *rewards.values()]
        table = torch.stack([column.double() for column in columns], -1)
        units, trajectory_index = torch.unique(table, dim=0, return_inverse=True)
        rows = torch.arange(len(trajectory_index), device=trajectory_index.device)
        first_sample = torch.full_like(rows[: len(units)], len(rows)).scatter_reduce_(0, trajectory_index, rows, "amin")
        _, group = torch.unique(batch[keys.GROUP_ID][first_sample], return_inverse=True)
        return cls(batch, trajectory_index, first_sample, group)

    def first(self, key: str | tuple[str, str]) -> torch.Tensor:
        """Return a [B] entry of the batch, one value a trajectory: [N] float64."""
        return self.batch[key][self.first_sample].double()


def baseline_and_std(
    rewards: torch.Tensor, group: torch.Tensor, *, leave_one_out: bool, min_std_share: float = MIN_STD_SHARE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased std of each reward's group, or of its others with `leave_one_out`: [N] float64 each.

    `group` [N] counts from 0 without gaps. If no other reward exists the mean is the reward itself; the std is 0
    if fewer than two rewards define it, and if it is zero but for rounding. Otherwise the std of the others is
    at least `min_std_share` of that of the whole group: half of it bounds |r - mean| / std by 2 sqrt(G), if others
    that are nearly equal would make it as large as they are close.

    Example: leave-one-out of one group [1, 2, 3]: means [2.5, 2, 1.5], stds [.7071, 1.4142, .7071]; of
    [0, .3, .3, .3, .3, .3, .3, .3001] the first std is .0530, half of the group's, in place of .00004.
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
    least = min_std_share * _group_std(table, counts) if leave_one_out else torch.zeros_like(std)
    std = torch.where(_is_rounding_error(std, table.abs().amax(-1, keepdim=True)), 0.0, std.maximum(least))
    baseline = torch.where(num_peers > 0, mean, table)
    return baseline[group, index_in_group], std.expand_as(table)[group, index_in_group]


def _group_std(table: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the unbiased std of each row's first `counts` [P] entries: [P, 1] of [P, G], whose other entries are 0."""
    present = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    mean = table.sum(-1, keepdim=True) / counts[:, None]
    squares = ((table - mean).square() * present).sum(-1, keepdim=True)
    return (squares / (counts[:, None] - 1).clamp(min=1)).sqrt()


def unbiased_std(
    values: torch.Tensor, magnitude: torch.Tensor | None = None, *, tolerance: float = RELATIVE_STD_TOLERANCE
) -> torch.Tensor:
    """Return the std of [N] values: a scalar, 0 for fewer than two and if it is zero but for rounding.

    `magnitude` is the largest input of the values (default: their own), to which rounding is relative.
    """
    if len(values) < 2:
        return values.new_zeros(())
    std = (values - values.mean()).square().sum().div(len(values) - 1).sqrt()
    magnitude = values.abs().max() if magnitude is None else magnitude
    return torch.where(_is_rounding_error(std, magnitude, tolerance), 0.0, std)


def _is_rounding_error(
    std: torch.Tensor, magnitude: torch.Tensor, tolerance: float = RELATIVE_STD_TOLERANCE
) -> torch.Tensor:
    """Return whether a std is zero relative to the largest magnitude of its inputs."""
    return std <= tolerance * magnitude


def divide_by_std(centred: torch.Tensor, std: torch.Tensor, epsilon: float = STD_EPSILON) -> torch.Tensor:
    """Return centred / (std + epsilon), or `centred` itself if the std is 0."""
    return torch.where(std > 0, centred / (std + epsilon), centred)


def whiten_tokens(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [B, T] with mean 0 and (biased) variance 1 over the tokens whose mask is 1."""
    values = torch.where(mask > 0, advantages, 0.0).double()
    count = mask.sum().clamp(min=1)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    return (values - mean) * variance.clamp(min=MIN_TOKEN_VARIANCE).rsqrt()


def is_informative(group: TrajectoryGroup, *, by_name: bool = False) -> bool:
    """Return whether the raw rewards of the group differ by more than rounding, its baseline's among them.

    Compared are their sums, or with `by_name` each named reward by itself.
    """
    of_chains = [t.rewards_of_chain(i) for t in group.scored for i in range(len(t.chains))]
    if len(of_chains) < 2:
        return False
    names = sorted({name for rewards in of_chains for name in rewards})
    table = torch.tensor([[rewards.get(name, 0.0) for name in names] for rewards in of_chains], dtype=torch.float64)
    columns = table.unbind(-1) if by_name else [table.sum(-1)]
    return any(bool(unbiased_std(column) > 0) for column in columns)


@torch.no_grad()
def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return the metrics of a batch, named as in docs/metrics.md without their prefix.

    `reward` and `filtered_reward` are the mean raw reward of the batch's trajectories; if dynamic sampling drops
    groups, the source replaces `reward` by the mean over all of them. `shaped_reward` is what the advantages are
    computed from. Advantages are over the valid tokens; 0 if there is none.
    """
    mask = batch[keys.TOKEN_MASK]  # [B, T]
    trajectories = TrajectoryIndex.of(batch, {"": batch[keys.REWARD]})
    raw = torch.zeros_like(batch[keys.REWARD])  # [B]
    for component in batch[keys.REWARD_COMPONENTS].values():
        raw = raw + component
    raw = raw[trajectories.first_sample].double()  # [N]
    steps = torch.arange(mask.shape[1], device=mask.device)
    # The prompt ends at the first sampled token, or with the sequence if none was sampled.
    prompt_lengths = torch.where(mask > 0, steps, batch[keys.LENGTHS][:, None]).amin(-1)
    metrics = {
        "reward": float(raw.mean()),
        "filtered_reward": float(raw.mean()),
        "shaped_reward": float(trajectories.first(keys.REWARD).mean()),
        "mean_prompt_length": float(prompt_lengths[trajectories.first_sample].double().mean()),
        "total_num_tokens": float(batch[keys.LENGTHS].sum()),
    }
    if batch.get(keys.BASELINE_REWARD, None) is not None:
        metrics["baseline_reward"] = float(trajectories.first(keys.BASELINE_REWARD).mean())
    advantages = batch.get(keys.ADVANTAGES, None)
    if advantages is not None:
        advantages = advantages[(mask * batch[keys.SAMPLE_MASK][:, None]) > 0].double()
        has_tokens = len(advantages) > 0
        metrics |= {
            "advantages/mean": float(advantages.mean()) if has_tokens else 0.0,
            "advantages/max": float(advantages.max()) if has_tokens else 0.0,
            "advantages/min": float(advantages.min()) if has_tokens else 0.0,
        }
    return metrics
