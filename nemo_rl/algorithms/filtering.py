"""Which groups teach something: the pure part of dynamic sampling (DAPO, arXiv 2503.14476)."""

from collections.abc import Sequence

import torch

from nemo_rl.algorithms.group_statistics import unbiased_std
from nemo_rl.types import TrajectoryGroup


def is_informative(group: TrajectoryGroup) -> bool:
    """Whether the raw rewards of the group's survivors differ by more than rounding; one alone never does."""
    rewards = torch.tensor([t.reward for t in group.survivors], dtype=torch.float64)
    return bool(unbiased_std(rewards) > 0)


def informative_groups(groups: Sequence[TrajectoryGroup]) -> tuple[TrajectoryGroup, ...]:
    """The groups whose rewards are not all equal, in order: the others' advantages are 0."""
    return tuple(group for group in groups if is_informative(group))
