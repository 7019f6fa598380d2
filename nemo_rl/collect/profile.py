"""Statistics of a collection over all tasks, each dataset, environment and task; their uses: comparisons, curricula."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rl.collect.shards import OverlongInput, Task, read_tasks
from nemo_rl.collect.table import UNKNOWN_LENGTH, RolloutTable, read_table
from nemo_rl.collect.task_metrics import Floats, Statistics, TaskMetrics, compute_task_metrics
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

ALL_DATASETS = "all"
ENV_PREFIX = "env/"  # marks an environment's name beside datasets, as in metrics
THRESHOLDS = (0.25, 0.5, 0.75, 1.0)  # mean rewards


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of one quantity over tasks."""

    mean: float | None  # None without tasks
    standard_error: float | None  # standard error of that mean, over tasks; None for fewer than two
    num_tasks: int  # tasks that have enough rollouts for it


@dataclass(frozen=True, slots=True)
class Summary:
    """A dataset or environment as a whole; means are over tasks with equal weights."""

    dataset: str  # "all": every task; "env/<name>": those of an environment, or of an agent of NeMo Gym
    num_tasks: int
    expected: int  # rollouts
    num_rollouts: int  # rollouts that have a reward
    missing: int  # rollouts without a reward, including failed ones
    scores: Mapping[str, Score]  # "reward", "tokens", "pass@1[avg-of-4]", "pass@4", "majority@4", ...
    thresholds: Mapping[float, float]  # mean reward -> share of the tasks with rollouts at it or above
    num_failed: int = 0  # rollouts that failed each time: wrong answers in all scores, no part of the reward

    def describe_failed(self) -> str:
        """Describe what the failed rollouts do to the scores.

        Example: "95 of 100 rollouts failed and count as wrong: pass@1 0.0500, mean reward of the others 1.0000".
        """
        single = next(score.mean for name, score in self.scores.items() if name.startswith("pass@1["))
        reward = self.scores["reward"].mean
        others = "" if reward is None else f", mean reward of the others {reward:.4f}"
        failed = f"{self.num_failed} of {self.expected} rollouts failed and count as wrong"
        return failed if single is None else f"{failed}: pass@1 {single:.4f}{others}"


@dataclass(frozen=True, slots=True)
class Profile:
    """A collection, measured. Memory: 20 bytes per rollout, 8 per task and quantity."""

    directory: Path
    table: RolloutTable
    measures: TaskMetrics
    summaries: tuple[Summary, ...]  # all tasks, then each dataset if there are several

    @property
    def quantities(self) -> Mapping[str, Floats]:
        """Return the values [T] by name of every score of a summary."""
        measures = self.measures
        return {"reward": measures.reward.mean, "tokens": measures.tokens.mean, **measures.scores}

    def task_indices(self, dataset: str) -> npt.NDArray[np.int64]:
        """Return the indices of the tasks of a `Summary.dataset`. Raises ConfigError for an unknown one."""
        table = self.table
        if dataset == ALL_DATASETS:
            return np.arange(len(table.rewards))
        if dataset in table.datasets:
            return np.flatnonzero(table.dataset_of_task == table.datasets.index(dataset))
        envs = [ENV_PREFIX + env for env in table.envs]
        if dataset in envs:
            return np.flatnonzero(table.env_of_task == envs.index(dataset))
        known = (ALL_DATASETS, *table.datasets, *envs)
        raise ConfigError("dataset", dataset, "is not in this collection", known=known)


def profile(
    directory: str | Path,
    *,
    seeds: Iterable[int] | None = None,
    ks: Sequence[int] | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Profile:
    """Read and measure the collection in `directory`, its shards or what `merge` made of them.

    A rollout that failed each time counts as a wrong answer in pass@k and majority@k: with the lowest reward of the
    collection, at most 0. One that is missing counts nowhere but in `missing`. Raises ConfigError for a directory
    without a collection and for a k above the rollouts of a task, DataError for files that are damaged.
    """
    table = read_table(directory, seeds)
    bare = Profile(Path(directory), table, compute_task_metrics(table, ks), ())
    summaries = tuple(_summarize(bare, name, thresholds) for name in _list_groups(table))
    if (overlong := OverlongInput.of_run(table.manifest.run)) is not None:
        logger.warning("%s: %s", directory, overlong.describe())
    if (whole := summaries[0]).num_failed:
        logger.warning("%s: %s", directory, whole.describe_failed())
    return Profile(bare.directory, table, bare.measures, summaries)


def iter_task_rows(profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each task in order: its statistics, its rollouts and its input row."""
    known: Iterable[Task | None] = chain(read_tasks(profile.directory), repeat(None))
    for index, task in zip(range(len(profile.table.rewards)), known, strict=False):
        yield _task_row(profile, index, task)


def _list_groups(table: RolloutTable) -> list[str]:
    """Return "all", the datasets if there are several, and the environments if they divide the tasks otherwise."""
    num_datasets, num_envs = len(table.datasets), len(table.envs)
    pairs = set(zip(table.dataset_of_task.tolist(), table.env_of_task.tolist(), strict=True))
    groups = [ALL_DATASETS, *(table.datasets if num_datasets > 1 else ())]
    if num_envs > 1 and not len(pairs) == num_datasets == num_envs:
        groups += [ENV_PREFIX + env for env in table.envs]
    return groups


def _summarize(profile: Profile, dataset: str, thresholds: Sequence[float]) -> Summary:
    tasks = profile.task_indices(dataset)
    expected = len(tasks) * profile.table.rewards.shape[1]
    num_rollouts = int(profile.measures.num_rollouts[tasks].sum())
    means = profile.measures.reward.mean[tasks]
    means = means[~np.isnan(means)]
    return Summary(
        dataset,
        len(tasks),
        expected,
        num_rollouts,
        expected - num_rollouts,
        {name: compute_score(values[tasks]) for name, values in profile.quantities.items()},
        {limit: float((means >= limit - 1e-9).mean()) for limit in thresholds} if len(means) else {},
        int(profile.table.num_failed[tasks].sum()),
    )


def compute_score(values: Floats) -> Score:
    """Return the mean of the numbers that are not NaN, with its standard error."""
    values = values[~np.isnan(values)]
    count = len(values)
    mean = float(values.mean()) if count else None
    error = float(values.std(ddof=1) / np.sqrt(count)) if count > 1 else None
    return Score(mean, error, count)


def _task_row(profile: Profile, index: int, task: Task | None) -> dict[str, Any]:
    table, measures = profile.table, profile.measures
    expected, num_rollouts = table.rewards.shape[1], int(measures.num_rollouts[index])
    tokens = [None if n == UNKNOWN_LENGTH else n for n in table.tokens[index].tolist()]
    return {
        "task_index": index,
        "dataset": table.datasets[table.dataset_of_task[index]],
        "env": table.envs[table.env_of_task[index]],
        **({"prompt_id": task.prompt_id, "task_name": task.task_name} if task else {}),
        "expected": expected,
        "num_rollouts": num_rollouts,
        "missing": expected - num_rollouts,
        "num_failed": int(table.num_failed[index]),
        "reward": _statistics_dict(measures.reward, index),
        "tokens": _statistics_dict(measures.tokens, index),
        **{name: _float_or_none(values[index]) for name, values in measures.scores.items()},
        # rewards by seed, then by rollout; None: missing or failed
        "rollout_rewards": [_float_or_none(reward) for reward in table.rewards[index]],
        "rollout_tokens": tokens,
        **({"row": task.row} if task else {}),
    }


def _statistics_dict(statistics: Statistics, index: int) -> dict[str, float | None]:
    names = ("mean", "std", "min", "max", "median")
    return {name: _float_or_none(getattr(statistics, name)[index]) for name in names}


def _float_or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
