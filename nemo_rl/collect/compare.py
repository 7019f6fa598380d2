"""Uses of profiles: a comparison of two collections, and a curriculum of tasks of suitable difficulty."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_rl.collect.files import atomic_write
from nemo_rl.collect.profile import ALL_DATASETS, Floats, Profile, compute_score
from nemo_rl.collect.tasks import TASKS_FILE, read_tasks
from nemo_rl.data.rows import encode_json_line
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

ROUNDING = 1e-9  # a mean of thirds is not exactly the intended limit


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of one dataset in both collections."""

    dataset: str
    quantity: str  # "reward", "pass@4", ...
    first: float | None  # over all of its tasks that have rollouts
    second: float | None
    difference: float | None  # second - first; paired: over the tasks that both have rollouts of
    standard_error: float | None  # of the difference
    num_better: int | None  # tasks in which the second is higher; None: the tasks are not the same
    num_worse: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two profiles compared."""

    are_paired: bool  # the same tasks: differences are taken task by task, over those that both have rollouts of
    differences: tuple[Difference, ...]  # by dataset and quantity


def compare(first: Profile, second: Profile) -> Comparison:
    """Compare `second` with `first` in every dataset and quantity that both have.

    Where both have the same data (the `data` of their identities) tasks are compared one by one, which removes the
    difficulty of the tasks from the standard error; otherwise the means are compared.
    """
    runs = [profile.table.manifest.run for profile in (first, second)]
    are_paired = runs[0].get("data") == runs[1].get("data") and len(first.table.rewards) == len(second.table.rewards)
    pairs = [
        _difference(dataset, quantity, first, second, are_paired)
        for dataset in _common_names([s.dataset for s in first.summaries], [s.dataset for s in second.summaries])
        for quantity in _common_names(list(first.quantities), list(second.quantities))
    ]
    return Comparison(are_paired, tuple(pairs))


def _common_names(first: Sequence[str], second: Sequence[str]) -> Sequence[str]:
    return [name for name in first if name in second]


def _difference(dataset: str, quantity: str, first: Profile, second: Profile, are_paired: bool) -> Difference:
    values = [profile.quantities[quantity][profile.task_indices(dataset)] for profile in (first, second)]
    scores = [compute_score(value) for value in values]
    if are_paired:
        return _paired_difference(dataset, quantity, scores[0].mean, scores[1].mean, values[1] - values[0])
    means, errors = [score.mean for score in scores], [score.standard_error for score in scores]
    difference = None if means[0] is None or means[1] is None else means[1] - means[0]
    error = None if errors[0] is None or errors[1] is None else float(np.hypot(errors[0], errors[1]))
    return Difference(dataset, quantity, means[0], means[1], difference, error, None, None)


def _paired_difference(
    dataset: str, quantity: str, first: float | None, second: float | None, differences: Floats
) -> Difference:
    score = compute_score(differences)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    return Difference(dataset, quantity, first, second, score.mean, score.standard_error, better, worse)


@dataclass(frozen=True, slots=True)
class RewardRange:
    """Mean rewards from `low` to `high`, both included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError("min_reward", self.low, f"must not be above max_reward, {self.high}")


def write_curriculum(profile: Profile, path: Path, rewards: RewardRange, *, dataset: str = ALL_DATASETS) -> int:
    """Write the unchanged input rows of all tasks whose mean reward is in the range, and return their number.

    Rows keep the order of the input; tasks without any rollout are omitted. Raises ConfigError where the collection
    has kept no input or no task is in the range.
    """
    means = profile.measures.reward.mean
    chosen = np.zeros(len(means), np.bool_)
    chosen[profile.task_indices(dataset)] = True
    with np.errstate(invalid="ignore"):
        chosen &= (means >= rewards.low - ROUNDING) & (means <= rewards.high + ROUNDING)
    if not (profile.directory / TASKS_FILE).exists():
        raise ConfigError("directory", str(profile.directory), f"has no {TASKS_FILE} to take rows from")
    if not chosen.any():
        raise ConfigError("min_reward, max_reward", (rewards.low, rewards.high), "no task has a mean reward in it")
    with atomic_write(path) as file:
        for index, task in enumerate(read_tasks(profile.directory)):
            if index < len(chosen) and chosen[index]:
                file.write(encode_json_line(task.row))
    return int(chosen.sum())
