"""Statistics of a collection over all tasks, each dataset and each task; their uses: comparisons and curricula."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_rl.collect.files import atomic_write
from nemo_rl.collect.shards import TASKS_FILE, Task, read_tasks
from nemo_rl.collect.table import NO_ANSWER, UNKNOWN_LENGTH, RolloutTable, read_table
from nemo_rl.errors import ConfigError
from nemo_rl.experience.records import best_of_k_probabilities, encode_json_line, majority_at_k

Floats = npt.NDArray[np.float64]

ALL_DATASETS = "all"
THRESHOLDS = (0.25, 0.5, 0.75, 1.0)  # mean rewards
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
    """Metrics of each task."""

    num_rollouts: npt.NDArray[np.int64]  # [T], those with a reward
    reward: Statistics
    tokens: Statistics
    scores: Mapping[str, Floats]  # [T] by name: "pass@1[avg-of-4]", "pass@4", "majority@4"


def compute_task_metrics(table: RolloutTable, ks: Sequence[int] | None = None) -> TaskMetrics:
    """Compute the metrics of every task. `ks`: of pass@k and majority@k; None: the powers of two up to n, and n.

    The mean over all that a task has counts for pass@1[avg-of-n], its name says how many are expected. Above 32
    rollouts a task majority@k is for k = n alone. Raises ConfigError for a k above n.
    """
    num_columns = table.rewards.shape[1]
    ks = _validate_ks(ks, num_columns) if ks is not None else default_ks(num_columns)
    lengths = np.where(table.tokens == UNKNOWN_LENGTH, np.nan, table.tokens)
    reward = _compute_statistics(table.rewards)
    scores = {f"pass@1[avg-of-{num_columns}]": reward.mean}
    scores |= {f"pass@{k}": _pass_at_k(table.rewards, k) for k in ks if k > 1}
    if (table.answers != NO_ANSWER).any():
        voters = [k for k in ks if k > 1 and (num_columns <= MAX_VOTERS or k == num_columns)]
        scores |= {f"majority@{k}": _majority_at_k(table, k) for k in voters}
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


def _pass_at_k(rewards: Floats, k: int) -> Floats:
    result = np.full(len(rewards), np.nan)
    for start in range(0, len(rewards), BLOCK_TASKS):
        block = np.sort(rewards[start : start + BLOCK_TASKS], axis=1)
        counts = (~np.isnan(block)).sum(axis=1)
        for count in np.unique(counts[counts >= k]).tolist():
            tasks = np.flatnonzero(counts == count)
            result[start + tasks] = block[tasks, :count] @ np.array(best_of_k_probabilities(count, k))
    return result


def _majority_at_k(table: RolloutTable, k: int) -> Floats:
    result = np.full(len(table.rewards), np.nan)
    for task, (rewards, answers) in enumerate(zip(table.rewards, table.answers, strict=True)):
        is_present = ~np.isnan(rewards)
        if is_present.sum() >= k:
            votes = [None if answer == NO_ANSWER else answer for answer in answers[is_present].tolist()]
            result[task] = majority_at_k(rewards[is_present].tolist(), votes, k)
    return result


@dataclass(frozen=True, slots=True)
class Score:
    """The mean of one quantity over tasks."""

    mean: float | None  # None: of no task
    standard_error: float | None  # of that mean, over tasks; None for fewer than two
    num_tasks: int  # that have enough rollouts for it


@dataclass(frozen=True, slots=True)
class Summary:
    """A dataset as a whole; means are over tasks with equal weights."""

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
    summaries: tuple[Summary, ...]  # all tasks, then each dataset where there are several

    @property
    def quantities(self) -> Mapping[str, Floats]:
        """Return the values [T] by name of every score of a summary."""
        measures = self.measures
        return {"reward": measures.reward.mean, "tokens": measures.tokens.mean, **measures.scores}

    def task_indices(self, dataset: str) -> npt.NDArray[np.int64]:
        """Return the indices of a dataset's tasks. Raises ConfigError for an unknown dataset."""
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


def iter_task_rows(profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each task in order: its statistics, its rollouts and its input row."""
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
        **({"prompt_id": task.prompt_id, "task_name": task.task_name} if task else {}),
        "expected": expected,
        "num_rollouts": num_rollouts,
        "missing": expected - num_rollouts,
        "reward": _statistics_dict(measures.reward, index),
        "tokens": _statistics_dict(measures.tokens, index),
        **{name: _float_or_none(values[index]) for name, values in measures.scores.items()},
        # by seed, then by rollout; None: missing
        "rollout_rewards": [_float_or_none(reward) for reward in table.rewards[index]],
        "rollout_tokens": tokens,
        **({"row": task.row} if task else {}),
    }


def _statistics_dict(statistics: Statistics, index: int) -> dict[str, float | None]:
    names = ("mean", "std", "min", "max", "median")
    return {name: _float_or_none(getattr(statistics, name)[index]) for name in names}


def _float_or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


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
