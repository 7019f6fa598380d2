"""Scores of k answers."""

from collections import Counter
from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.errors import ConfigError
from nemo_rl.experience.pass_at_k import majority_at_k, pass_at_k


def test_pass_at_k_of_binary_scores_has_the_closed_form() -> None:
    scores = [1.0] * 3 + [0.0] * 7
    for k in range(1, 11):
        assert pass_at_k(scores, k) == pytest.approx(1 - comb(7, k) / comb(10, k))


@given(st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_of_maxima_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    assert pass_at_k(scores, k) == pytest.approx(fmean(max(subset) for subset in combinations(scores, k)))


def test_pass_at_one_is_the_mean() -> None:
    assert pass_at_k([0.0, 1.0, 0.5, 0.5], 1) == 0.5


def test_majority_takes_the_score_of_the_most_frequent_answer() -> None:
    assert majority_at_k([1.0, 1.0, 0.0, 0.0], ["7", "7", "9", None]) == 1.0
    assert majority_at_k([0.0, 0.0, 1.0], ["9", "9", "7"]) == 0.0


def test_majority_averages_ties_and_gives_silence_nothing() -> None:
    assert majority_at_k([1.0, 0.0], ["7", "9"]) == 0.5
    assert majority_at_k([1.0, 1.0], [None, None]) == 0.0
    assert majority_at_k([1.0, 0.0, 0.0], ["7", None, None]) == 1.0


def brute_force_majority(scores: list[float], answers: list[str | None], k: int) -> float:
    def one(subset: tuple[int, ...]) -> float:
        votes = Counter(answer for i in subset if (answer := answers[i]) is not None)
        winners = [answer for answer, n in votes.items() if n == max(votes.values())]
        by_winner = [fmean(scores[i] for i in subset if answers[i] == winner) for winner in winners]
        return fmean(by_winner) if by_winner else 0.0

    return fmean(one(subset) for subset in combinations(range(len(scores)), k))


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["a", "b", "c", None])), min_size=1, max_size=7
    ),
    st.data(),
)
def test_majority_is_the_mean_over_all_subsets(rows: list[tuple[float, str | None]], data: st.DataObject) -> None:
    scores, answers = [score for score, _ in rows], [answer for _, answer in rows]
    k = data.draw(st.integers(1, len(rows)))
    assert majority_at_k(scores, answers, k) == pytest.approx(brute_force_majority(scores, answers, k))


@pytest.mark.parametrize("k", [0, 3])
def test_k_outside_of_the_number_of_answers_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to"):
        pass_at_k([0.0, 1.0], k)
    with pytest.raises(ConfigError, match="from 1 to"):
        majority_at_k([0.0, 1.0], ["a", "b"], k)
