"""Means and standard deviations within groups of rewards: two-pass, unbiased, safe for nearly equal rewards."""

import torch

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
