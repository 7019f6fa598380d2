"""Two collections side by side: by how much one model is better than another, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl.collect.measures import Floats
from nemo_rl.collect.profile import Profile, compute_score


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of one data set in both."""

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
    differences: tuple[Difference, ...]  # by data set and quantity


def compare(first: Profile, second: Profile) -> Comparison:
    """What `second` has more than `first`, for every data set and quantity that both have.

    Where both are of the same data (the `data` of their identities) tasks are compared one by one, which takes the
    difficulty of the tasks out of the standard error; elsewhere the means are.
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
