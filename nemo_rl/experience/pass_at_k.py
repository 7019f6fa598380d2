"""Scores of k answers: pass@k, their mean, and the majority vote."""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb

from nemo_rl.errors import ConfigError


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """Return the best score of k answers, averaged over all subsets of k of the n given.

    For scores of 0 and 1 this is 1 - C(wrong, k) / C(n, k) (arXiv 2107.03374, equation 1).

    Example: scores [0, 1, .5], k = 2: the maxima 1, .5, 1 average to .8333.
    """
    shares = best_of_k_probabilities(len(scores), k)
    return sum(score * share for score, share in zip(sorted(scores), shares, strict=True))


@lru_cache(maxsize=1024)
def best_of_k_probabilities(num_answers: int, k: int) -> tuple[float, ...]:
    """Return the share of all subsets of k in which the answer of each rank, lowest score first, is the best."""
    _check_k(k, num_answers)
    return tuple(comb(rank, k - 1) / comb(num_answers, k) for rank in range(num_answers))


def majority_at_k(scores: Sequence[float], answers: Sequence[Hashable | None], k: int | None = None) -> float:
    """Return the score of the majority answer of k votes, averaged over all subsets of k of the n given (None: n).

    Answers with equally many votes are averaged; an answer's score is the mean over those who gave it. None is no
    answer and casts no vote; without any vote the score is 0.

    Example: answers [7, 7, 9, None], scores [1, 1, 0, 0]: k = 4 gives 1.
    """
    if len(answers) != len(scores):
        raise ValueError(f"{len(scores)} scores with {len(answers)} answers")
    k = len(scores) if k is None else k
    _check_k(k, len(scores))
    counts = Counter(answer for answer in answers if answer is not None)
    num_abstentions = len(answers) - counts.total()
    # Answers that were given equally often win equally often.
    given = tuple(sorted(counts.values()))
    wins = {count: _count_wins(count, given, num_abstentions, k) for count in set(given)}
    expected = sum(
        score * wins[counts[answer]] / counts[answer]
        for score, answer in zip(scores, answers, strict=True)
        if answer is not None
    )
    return expected / comb(len(scores), k)


@lru_cache(maxsize=1 << 16)  # few distinct vote counts occur over the tasks of a dataset
def _count_wins(count: int, counts: tuple[int, ...], num_abstentions: int, k: int) -> float:
    """Count the subsets of k in which an answer given `count` times wins the vote, a tie shared; `counts` of all."""
    if k == num_abstentions + sum(counts):  # everybody votes
        return (count == max(counts)) / counts.count(max(counts))
    others = list(counts)
    others.remove(count)
    return sum(
        comb(count, votes) * _count_shared_wins(others, num_abstentions, votes, k - votes)
        for votes in range(1, count + 1)
    )


def _count_shared_wins(others: Sequence[int], num_abstentions: int, votes: int, remaining: int) -> float:
    """Count ways to fill the other places so that no answer has more than `votes`, each divided by its winners.

    Adds one other answer after the other to a table {(places filled, ties): ways}.
    """
    if remaining < 0:
        return 0.0
    ways = {(filled, 0): comb(num_abstentions, filled) for filled in range(min(num_abstentions, remaining) + 1)}
    for count in others:
        extended: Counter[tuple[int, int]] = Counter()
        for (filled, ties), n in ways.items():
            for num_cast in range(min(count, votes, remaining - filled) + 1):
                extended[filled + num_cast, ties + (num_cast == votes)] += n * comb(count, num_cast)
        ways = extended
    return sum(n / (ties + 1) for (filled, ties), n in ways.items() if filled == remaining)


def _check_k(k: int, num_answers: int) -> None:
    if not 1 <= k <= num_answers:
        raise ConfigError("k", k, f"must be from 1 to the number of answers, {num_answers}")
