"""Measures of tasks against Python's own statistics and the formulas of one task."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.collect.profile import TaskMetrics, compute_task_metrics, default_ks
from nemo_rl.collect.table import NO_ANSWER, UNKNOWN_LENGTH, CollectionManifest, RolloutTable
from nemo_rl.experience.metrics import majority_at_k, pass_at_k

Cell = tuple[float, int, int]  # reward, length, answer
cells = st.none() | st.tuples(st.integers(-2, 4).map(lambda n: n / 4), st.integers(0, 50), st.integers(0, 3))


def table_of(tasks: list[list[Cell | None]]) -> RolloutTable:
    missing = (np.nan, UNKNOWN_LENGTH, NO_ANSWER)
    values = np.array([[missing if cell is None else cell for cell in task] for task in tasks])
    rewards, tokens, answers = np.moveaxis(values, 2, 0)
    manifest = CollectionManifest((0,), len(tasks), len(tasks[0]), {}, (), ())
    datasets = np.zeros(len(tasks), np.int32)
    return RolloutTable(manifest, rewards, tokens.astype(np.int32), answers.astype(np.int64), datasets, ("",))


def check(measures: TaskMetrics, index: int, task: list[Cell]) -> None:
    for found, place in ((measures.reward, 0), (measures.tokens, 1)):
        numbers = [cell[place] for cell in task]
        expected = {
            "mean": statistics.fmean(numbers) if numbers else np.nan,
            "std": statistics.stdev(numbers) if len(numbers) > 1 else np.nan,
            "min": min(numbers, default=np.nan),
            "max": max(numbers, default=np.nan),
            "median": statistics.median(numbers) if numbers else np.nan,
        }
        for name, value in expected.items():
            assert getattr(found, name)[index] == pytest.approx(value, abs=1e-9, nan_ok=True), name
    rewards, answers = [cell[0] for cell in task], [cell[2] or None for cell in task]
    for name, values in measures.scores.items():
        kind, _, k = name.partition("@")
        if "avg" in name:
            continue
        count = int(k)
        if count > len(task):
            value = np.nan
        else:
            value = pass_at_k(rewards, count) if kind == "pass" else majority_at_k(rewards, answers, count)
        assert values[index] == pytest.approx(value, abs=1e-9, nan_ok=True), name


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1, max_size=5)))
def test_each_task_is_measured_as_if_alone(tasks: list[list[Cell | None]]):
    measures = compute_task_metrics(table_of(tasks))
    for index, task in enumerate(tasks):
        there = [cell for cell in task if cell is not None]
        assert measures.num_rollouts[index] == len(there)
        check(measures, index, there)


def test_above_32_rollouts_all_vote_or_nobody():
    scores = compute_task_metrics(table_of([[(1.0, 3, 1)] * 40])).scores
    assert [name for name in scores if name.startswith("majority")] == ["majority@40"]
    assert [name for name in scores if name.startswith("pass@")] == [
        "pass@1[avg-of-40]",
        *(f"pass@{k}" for k in (2, 4, 8, 16, 32, 40)),
    ]


def test_ks_may_be_chosen():
    scores = compute_task_metrics(table_of([[(1.0, 3, 1)] * 4]), ks=[3, 1]).scores
    assert list(scores) == ["pass@1[avg-of-4]", "pass@3", "majority@3"]
    assert default_ks(1) == (1,)
