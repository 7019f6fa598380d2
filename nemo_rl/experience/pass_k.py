"""What several answers to one prompt tell: pass@k, pass@1[avg-of-k], majority@k. All exact, none samples."""

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb

from nemo_rl.errors import ConfigError


def pass_at_k(scores: Sequence[float], k: int) -> float:
    """The best score of k answers, averaged over all subsets of k of the n given.

    For scores of 0 and 1 this is 1 - C(wrong, k) / C(n, k) (arXiv 2107.03374, equation 1).

    Example: scores [0, 1, .5], k = 2: the maxima 1, .5, 1 average to .8333.
    """
    shares = best_of_k_shares(len(scores), k)
    return sum(score * share for score, share in zip(sorted(scores), shares, strict=True))


@lru_cache(maxsize=1024)
def best_of_k_shares(num_answers: int, k: int) -> tuple[float, ...]:
    """The share of all subsets of k in which the answer of each rank, lowest score first, is the best."""
    _check(k, num_answers)
    return tuple(comb(rank, k - 1) / comb(num_answers, k) for rank in range(num_answers))


def pass_at_1_avg_of_k(scores: Sequence[float]) -> float:
    """The mean score: what one answer can be expected to reach."""
    _check(1, len(scores))
    return sum(scores) / len(scores)


def majority_at_k(scores: Sequence[float], answers: Sequence[Hashable | None], k: int | None = None) -> float:
    """The score of the answer that most of k votes name, averaged over all subsets of k of the n given (None: n).

    Answers with equally many votes are averaged; an answer's score is the mean over those who gave it. None is no
    answer and casts no vote; where nobody votes the score is 0.

    Example: answers [7, 7, 9, None], scores [1, 1, 0, 0]: k = 4 gives 1.
    """
    if len(answers) != len(scores):
        raise ValueError(f"{len(scores)} scores with {len(answers)} answers")
    k = len(scores) if k is None else k
    _check(k, len(scores))
    counts = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - counts.total()
    # Answers that were given equally often win equally often.
    given = tuple(sorted(counts.values()))
    wins = {count: _wins(count, given, silent, k) for count in set(given)}
    expected = sum(
        score * wins[counts[answer]] / counts[answer]
        for score, answer in zip(scores, answers, strict=True)
        if answer is not None
    )
    return expected / comb(len(scores), k)


@lru_cache(maxsize=1 << 16)  # few ways to vote come back over the tasks of a data set
def _wins(count: int, counts: tuple[int, ...], silent: int, k: int) -> float:
    """In how many subsets of k an answer given `count` times has the most votes, a tie shared; `counts` of all."""
    if k == silent + sum(counts):  # everybody votes
        return (count == max(counts)) / counts.count(max(counts))
    others = list(counts)
    others.remove(count)
    return sum(comb(count, votes) * _shared_wins(others, silent, votes, k - votes) for votes in range(1, count + 1))


def _shared_wins(others: Sequence[int], silent: int, votes: int, remaining: int) -> float:
    """Ways to fill the other places so that nobody has more than `votes`, each divided by the winners it leaves.

    Adds one other answer after the other to a table {(places filled, ties): ways}.
    """
    if remaining < 0:
        return 0.0
    ways = {(filled, 0): comb(silent, filled) for filled in range(min(silent, remaining) + 1)}
    for count in others:
        extended: Counter[tuple[int, int]] = Counter()
        for (filled, ties), n in ways.items():
            for cast in range(min(count, votes, remaining - filled) + 1):
                extended[filled + cast, ties + (cast == votes)] += n * comb(count, cast)
        ways = extended
    return sum(n / (ties + 1) for (filled, ties), n in ways.items() if filled == remaining)


def _check(k: int, num_answers: int) -> None:
    if not 1 <= k <= num_answers:
        raise ConfigError("k", k, f"must be from 1 to the number of answers, {num_answers}")
