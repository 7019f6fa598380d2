"""Which groups teach something: the pure part of dynamic sampling (DAPO, arXiv 2503.14476)."""

import torch

from nemo_rl.algorithms.group_statistics import unbiased_std
from nemo_rl.types import TrajectoryGroup


def is_informative(group: TrajectoryGroup) -> bool:
    """Whether the raw rewards of the group's survivors differ by more than rounding; one alone never does."""
    rewards = torch.tensor([t.reward for t in group.survivors], dtype=torch.float64)
    return bool(unbiased_std(rewards) > 0)
