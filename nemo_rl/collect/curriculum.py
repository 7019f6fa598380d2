"""A data set of the tasks that a model finds neither too easy nor too hard."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_rl.collect.profile import ALL_DATASETS, Profile
from nemo_rl.collect.tasks import TASKS_FILE, read_tasks
from nemo_rl.collect.whole_file import atomic_write
from nemo_rl.data.jsonl import encode_json_line
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

ROUNDING = 1e-9  # a mean of thirds is not exactly the limit that was meant


@dataclass(frozen=True, slots=True)
class RewardRange:
    """Mean rewards from `low` to `high`, both included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError("min_reward", self.low, f"must not be above max_reward, {self.high}")


def write_curriculum(profile: Profile, path: Path, rewards: RewardRange, *, dataset: str = ALL_DATASETS) -> int:
    """Write the input rows, as they were, of all tasks whose mean reward lies in the range; how many there are.

    In the order of the input; tasks without any rollout are left out. Raises ConfigError where the collection has kept
    no input or no task is in the range.
    """
    means = profile.measures.reward.mean
    chosen = np.zeros(len(means), np.bool_)
    chosen[profile.task_indices(dataset)] = True
    with np.errstate(invalid="ignore"):
        chosen &= (means >= rewards.low - ROUNDING) & (means <= rewards.high + ROUNDING)
    if not (profile.directory / TASKS_FILE).exists():
        raise ConfigError("directory", str(profile.directory), f"has no {TASKS_FILE} to take rows from")
    if not chosen.any():
        raise ConfigError("min_reward, max_reward", (rewards.low, rewards.high), "no task's mean reward lies there")
    with atomic_write(path) as file:
        for index, task in enumerate(read_tasks(profile.directory)):
            if index < len(chosen) and chosen[index]:
                file.write(encode_json_line(task.row))
    return int(chosen.sum())
