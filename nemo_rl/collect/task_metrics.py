"""Metrics of each task over its rollouts: statistics of reward and length, pass@k, majority@k."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nemo_rl.collect.table import NO_ANSWER, UNKNOWN_LENGTH, RolloutTable
from nemo_rl.errors import ConfigError
from nemo_rl.experience.pass_at_k import best_of_k_probabilities, majority_at_k

Floats = npt.NDArray[np.float64]
BLOCK_TASKS = 4096
MAX_VOTERS = 32  # above it, counting the votes of all subsets of k takes too long: only k = n


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one quantity over each task's rollouts: [T] each."""

    mean: Floats
    std: Floats  # unbiased (n - 1); NaN for one rollout
    min: Floats
    max: Floats
    median: Floats


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    num_rollouts: npt.NDArray[np.int64]  # [T], those with a reward
    reward: Statistics
    tokens: Statistics
    scores: Mapping[str, Floats]  # [T] by name: "pass@1[avg-of-4]", "pass@4", "majority@4"


def compute_task_metrics(table: RolloutTable, ks: Sequence[int] | None = None) -> TaskMetrics:
    """Compute the metrics of every task. `ks`: of pass@k and majority@k; None: the powers of two up to n, and n.

    In the scores a failed rollout counts as a wrong answer (`RolloutTable.counted_rewards`); the reward is that of the
    rollouts that have one.

    The mean over all that a task has counts for pass@1[avg-of-n], its name says how many are expected. Above 32
    rollouts a task majority@k is for k = n alone. Raises ConfigError for a k above n.
    """
    num_columns = table.rewards.shape[1]
    ks = _validate_ks(ks, num_columns) if ks is not None else default_ks(num_columns)
    lengths = np.where(table.tokens == UNKNOWN_LENGTH, np.nan, table.tokens)
    rewards, reward = table.counted_rewards, _compute_statistics(table.rewards)
    counted = reward if rewards is table.rewards else _compute_statistics(rewards)
    scores = {f"pass@1[avg-of-{num_columns}]": counted.mean}
    scores |= {f"pass@{k}": pass_at_k_of_tasks(rewards, k) for k in ks if k > 1}
    if (table.answers != NO_ANSWER).any():
        voters = [k for k in ks if k > 1 and (num_columns <= MAX_VOTERS or k == num_columns)]
        scores |= {f"majority@{k}": _majority_at_k(rewards, table.answers, k) for k in voters}
    num_rollouts = (~np.isnan(table.rewards)).sum(axis=1)
    return TaskMetrics(num_rollouts, reward, _compute_statistics(lengths), scores)


def default_ks(num_rollouts: int) -> tuple[int, ...]:
    """Return the powers of two up to the number of rollouts, and that number.

    Example: 12 rollouts give 1, 2, 4, 8, 12.
    """
    powers = (1 << exponent for exponent in range(num_rollouts.bit_length()))
    return tuple(sorted({*powers, num_rollouts}))


def _validate_ks(ks: Sequence[int], num_rollouts: int) -> tuple[int, ...]:
    for k in ks:
        if not 1 <= k <= num_rollouts:
            raise ConfigError("k", k, f"must be from 1 to {num_rollouts}, the rollouts of each task")
    return tuple(sorted(set(ks)))


def _compute_statistics(values: Floats) -> Statistics:
    """Compute the statistics of each row's numbers that are not NaN."""
    mean, std, low, high, median = np.full((5, len(values)), np.nan)
    for start in range(0, len(values), BLOCK_TASKS):
        block = np.sort(values[start : start + BLOCK_TASKS], axis=1)  # NaN last
        rows = np.arange(len(block))
        count = (~np.isnan(block)).sum(axis=1)
        at = slice(start, start + len(block))
        with np.errstate(invalid="ignore", divide="ignore"):
            mean[at] = np.nansum(block, axis=1) / count
            deviations = np.nansum((block - mean[at, None]) ** 2, axis=1)
            std[at] = np.where(count > 1, np.sqrt(deviations / (count - 1)), np.nan)
        last = np.maximum(count - 1, 0)
        low[at], high[at] = block[:, 0], block[rows, last]
        median[at] = (block[rows, last // 2] + block[rows, (last + 1) // 2]) / 2
    return Statistics(mean, std, low, high, median)


def pass_at_k_of_tasks(rewards: Floats, k: int) -> Floats:
    """Return pass@k of each task [T] from its rewards [T, N] (NaN: missing); NaN with fewer than k rewards."""
    result = np.full(len(rewards), np.nan)
    for start in range(0, len(rewards), BLOCK_TASKS):
        block = np.sort(rewards[start : start + BLOCK_TASKS], axis=1)
        counts = (~np.isnan(block)).sum(axis=1)
        for count in np.unique(counts[counts >= k]).tolist():
            tasks = np.flatnonzero(counts == count)
            result[start + tasks] = block[tasks, :count] @ np.array(best_of_k_probabilities(count, k))
    return result


def _majority_at_k(rewards: Floats, answers: npt.NDArray[np.int64], k: int) -> Floats:
    result = np.full(len(rewards), np.nan)
    for task, (scores, given) in enumerate(zip(rewards, answers, strict=True)):
        is_present = ~np.isnan(scores)
        if is_present.sum() >= k:
            votes = [None if answer == NO_ANSWER else answer for answer in given[is_present].tolist()]
            result[task] = majority_at_k(scores[is_present].tolist(), votes, k)
    return result
