"""Curricula: the input rows of the tasks whose mean reward is in a range."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_rl.collect.profile import ALL_DATASETS, Profile
from nemo_rl.collect.rollout_files import atomic_write
from nemo_rl.collect.shards import TASKS_FILE, read_tasks
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollout_rows import encode_json_line

ROUNDING = 1e-9  # a mean of thirds is not exactly the intended limit


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

    Rows keep the order of the input; tasks without any rollout are omitted. Raises ConfigError if the collection
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
