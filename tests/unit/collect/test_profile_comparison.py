"""Comparisons of two profiles."""

import pytest

from nemo_rl.collect.profile import profile
from nemo_rl.collect.profile_comparison import compare
from nemo_rl.collect.profile_report import comparison_table
from tests.unit.collect.collections import IDENTITY, collect, collect_worked


def rows(comparison):
    return {row.quantity: row for row in comparison.differences}


def test_the_same_tasks_are_compared_one_by_one(tmp_path):
    collect_worked(tmp_path / "a")
    collect_worked(tmp_path / "b", change=0.25, identity={**IDENTITY, "model": "trained"})
    comparison = compare(profile(tmp_path / "a"), profile(tmp_path / "b"))
    assert comparison.are_paired
    reward = rows(comparison)["reward"]
    assert (reward.first, reward.second) == (pytest.approx(11 / 24), pytest.approx(17 / 24))
    assert reward.difference == pytest.approx(0.25)
    assert reward.standard_error == pytest.approx(0, abs=1e-12)  # every task rose by as much
    assert (reward.num_better, reward.num_worse) == (2, 0)
    tokens = rows(comparison)["tokens"]
    assert (tokens.difference, tokens.num_better, tokens.num_worse) == (0, 0, 0)


def test_the_table_names_columns_by_what_tells_them_apart(tmp_path):
    collect_worked(tmp_path / "a")
    collect_worked(tmp_path / "b", change=0.25, identity={**IDENTITY, "model": "trained"})
    comparison = compare(profile(tmp_path / "a"), profile(tmp_path / "b"))
    table = comparison_table(comparison, "runs/one/step_5", "runs/one/step_9")
    assert [str(column.header) for column in table.columns][2:4] == ["step_5", "step_9"]
    assert "runs/one/step_9 against runs/one/step_5" in str(table.title)
    by_quantity = dict(
        zip(table.columns[1].cells, zip(*(c.cells for c in table.columns[4:]), strict=True), strict=True)
    )
    assert by_quantity["reward"] == ("+0.2500 ± 0.0000", "2", "0")
    assert by_quantity["tokens"] == ("+0.0 ± 0.0", "", "")  # neither more nor fewer are better
    for first, second, names in (
        ("a", "b", ["a", "b"]),
        ("/x/1/a", "/x/2/a", ["1/a", "2/a"]),
        ("a", "a/b", ["a", "a/b"]),
    ):
        assert [str(c.header) for c in comparison_table(comparison, first, second).columns][2:4] == names


def test_of_other_tasks_the_means_are_compared(tmp_path):
    collect_worked(tmp_path / "a")
    collect_worked(tmp_path / "b", change=0.25, identity={**IDENTITY, "data": "others"})
    comparison = compare(profile(tmp_path / "a"), profile(tmp_path / "b"))
    assert not comparison.are_paired
    reward = rows(comparison)["reward"]
    assert reward.difference == pytest.approx(0.25)
    assert reward.standard_error == pytest.approx(7 / 24 * 2**0.5)
    assert (reward.num_better, reward.num_worse) == (None, None)


def test_what_both_have_is_compared(tmp_path):
    collect(tmp_path / "two", num_repeats=2)
    collect(tmp_path / "four", num_repeats=4)
    comparison = compare(profile(tmp_path / "two"), profile(tmp_path / "four"))
    assert list(rows(comparison)) == ["reward", "tokens", "pass@2"]
    assert rows(comparison)["tokens"].difference is None  # of neither
