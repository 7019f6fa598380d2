"""What a collection tells of a model and of its tasks: the whole, each data set, each task."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rl.collect.measures import Floats, Statistics, TaskMetrics, compute_task_metrics
from nemo_rl.collect.table import UNKNOWN_LENGTH, RolloutTable, read_table
from nemo_rl.collect.tasks import Task, read_tasks
from nemo_rl.errors import ConfigError

ALL_DATASETS = "all"
THRESHOLDS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of one quantity over tasks."""

    mean: float | None  # None: of no task
    standard_error: float | None  # of that mean, over tasks; None for fewer than two
    num_tasks: int  # that have enough rollouts for it


@dataclass(frozen=True, slots=True)
class Summary:
    """A data set as a whole; means are over tasks, each counting the same."""

    dataset: str  # "all": every task
    num_tasks: int
    expected: int  # rollouts
    num_rollouts: int  # that have a reward
    missing: int
    scores: Mapping[str, Score]  # "reward", "tokens", "pass@1[avg-of-4]", "pass@4", "majority@4", ...
    thresholds: Mapping[float, float]  # mean reward -> share of the tasks with rollouts at it or above


@dataclass(frozen=True, slots=True)
class Profile:
    """A collection, measured. Memory: 20 bytes a rollout and 8 a task and quantity."""

    directory: Path
    table: RolloutTable
    measures: TaskMetrics
    summaries: tuple[Summary, ...]  # all tasks, then each data set where there are several

    @property
    def quantities(self) -> Mapping[str, Floats]:
        """[T] by name, everything that a summary has a score of."""
        measures = self.measures
        return {"reward": measures.reward.mean, "tokens": measures.tokens.mean, **measures.scores}

    def task_indices(self, dataset: str) -> npt.NDArray[np.int64]:
        """The indices of a data set's tasks."""
        table = self.table
        if dataset == ALL_DATASETS:
            return np.arange(len(table.rewards))
        if dataset not in table.datasets:
            raise ConfigError("dataset", dataset, "is not in this collection", known=(ALL_DATASETS, *table.datasets))
        return np.flatnonzero(table.dataset_of_task == table.datasets.index(dataset))


def profile(
    directory: str | Path,
    *,
    seeds: Iterable[int] | None = None,
    ks: Sequence[int] | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
) -> Profile:
    """Read and measure the collection in `directory`, its shards or what `merge` made of them.

    A rollout that is missing or has failed counts nowhere but in `missing`. Raises ConfigError for a directory without
    a collection and for a k above the rollouts of a task, DataError for files that are damaged.
    """
    table = read_table(directory, seeds)
    bare = Profile(Path(directory), table, compute_task_metrics(table, ks), ())
    names = [ALL_DATASETS] + (list(table.datasets) if len(table.datasets) > 1 else [])
    summaries = tuple(_summarize(bare, name, thresholds) for name in names)
    return Profile(bare.directory, table, bare.measures, summaries)


def task_rows(profile: Profile) -> Iterator[dict[str, Any]]:
    """One JSON object a task, in order, one in memory at a time: its statistics, its rollouts and its own row."""
    known: Iterable[Task | None] = chain(read_tasks(profile.directory), repeat(None))
    for index, task in zip(range(len(profile.table.rewards)), known, strict=False):
        yield _task_row(profile, index, task)


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
    )


def compute_score(values: Floats) -> Score:
    """The mean of the numbers that are no NaN, and how sure it is."""
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
        **({"prompt_id": task.prompt_id, "task_name": task.task_name} if task else {}),
        "expected": expected,
        "num_rollouts": num_rollouts,
        "missing": expected - num_rollouts,
        "reward": _statistics_dict(measures.reward, index),
        "tokens": _statistics_dict(measures.tokens, index),
        **{name: _float_or_none(values[index]) for name, values in measures.scores.items()},
        # By seed, then by rollout; None where one is missing.
        "rollout_rewards": [_float_or_none(reward) for reward in table.rewards[index]],
        "rollout_tokens": tokens,
        **({"row": task.row} if task else {}),
    }


def _statistics_dict(statistics: Statistics, index: int) -> dict[str, float | None]:
    names = ("mean", "std", "min", "max", "median")
    return {name: _float_or_none(getattr(statistics, name)[index]) for name in names}


def _float_or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
