"""Comparison of two profiles by dataset and quantity, with standard errors; paired if the tasks are the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl.collect.profile import Profile, compute_score
from nemo_rl.collect.task_metrics import Floats


@dataclass(frozen=True, slots=True)
class ScoreDifference:
    """One quantity of one dataset in both collections."""

    dataset: str
    quantity: str  # "reward", "pass@4", ...
    first: float | None  # mean over all of its tasks that have rollouts
    second: float | None
    difference: float | None  # second - first; paired: over the tasks that both have rollouts of
    standard_error: float | None  # standard error of the difference
    num_better: int | None  # tasks in which the second is higher; None: the tasks are not the same
    num_worse: int | None


@dataclass(frozen=True, slots=True)
class ProfileComparison:
    """Two profiles compared."""

    are_paired: bool  # the same tasks: differences are taken task by task, over those that both have rollouts of
    differences: tuple[ScoreDifference, ...]  # by dataset and quantity


def compare(first: Profile, second: Profile) -> ProfileComparison:
    """Compare `second` with `first` in every dataset and quantity that both have.

    If both have the same data (the `data` of their identities) tasks are compared one by one, which removes the
    difficulty of the tasks from the standard error; otherwise the means are compared.
    """
    runs = [profile.table.manifest.run for profile in (first, second)]
    are_paired = runs[0].get("data") == runs[1].get("data") and len(first.table.rewards) == len(second.table.rewards)
    pairs = [
        _difference(dataset, quantity, first, second, are_paired)
        for dataset in _common_names([s.dataset for s in first.summaries], [s.dataset for s in second.summaries])
        for quantity in _common_names(list(first.quantities), list(second.quantities))
    ]
    return ProfileComparison(are_paired, tuple(pairs))


def _common_names(first: Sequence[str], second: Sequence[str]) -> Sequence[str]:
    return [name for name in first if name in second]


def _difference(dataset: str, quantity: str, first: Profile, second: Profile, are_paired: bool) -> ScoreDifference:
    values = [profile.quantities[quantity][profile.task_indices(dataset)] for profile in (first, second)]
    scores = [compute_score(value) for value in values]
    if are_paired:
        return _paired_difference(dataset, quantity, scores[0].mean, scores[1].mean, values[1] - values[0])
    means, errors = [score.mean for score in scores], [score.standard_error for score in scores]
    difference = None if means[0] is None or means[1] is None else means[1] - means[0]
    error = None if errors[0] is None or errors[1] is None else float(np.hypot(errors[0], errors[1]))
    return ScoreDifference(dataset, quantity, means[0], means[1], difference, error, None, None)


def _paired_difference(
    dataset: str, quantity: str, first: float | None, second: float | None, differences: Floats
) -> ScoreDifference:
    score = compute_score(differences)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    return ScoreDifference(dataset, quantity, first, second, score.mean, score.standard_error, better, worse)
