import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.policy.packing import ALGORITHMS, balance, first_fit_decreasing, pack_for_ranks, split_packs

LENGTHS = st.lists(st.integers(1, 40), max_size=40)


def tokens(packs: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in pack) for pack in packs]


def fewest(lengths: list[int], capacity: int) -> int:
    """Packs in the best of all packings, by trying every one."""

    def fits(left: list[int], room: list[int]) -> bool:
        if not left:
            return True
        return any(fits(left[1:], [*room[:i], r - left[0], *room[i + 1 :]]) for i, r in enumerate(room) if r >= left[0])

    return next(n for n in range(len(lengths) + 1) if fits(sorted(lengths, reverse=True), [capacity] * n))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=LENGTHS, slack=st.integers(0, 30))
def test_every_sequence_is_in_one_pack_and_no_pack_is_too_long(algorithm: str, lengths: list[int], slack: int) -> None:
    capacity = max(lengths, default=1) + slack
    packs = ALGORITHMS[algorithm](lengths, capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < number <= capacity for number in tokens(packs, lengths))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=LENGTHS, slack=st.integers(0, 30), num_ranks=st.integers(1, 5))
def test_ranks_have_as_many_packs_and_share_every_sequence(
    algorithm: str, lengths: list[int], slack: int, num_ranks: int
) -> None:
    capacity = max(lengths, default=1) + slack
    ranks = pack_for_ranks(lengths, capacity, algorithm, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(i for packs in ranks for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(number <= capacity for packs in ranks for number in tokens(packs, lengths))
    needed = len(ALGORITHMS[algorithm](lengths, capacity))
    assert {len(packs) for packs in ranks} == {-(-needed // num_ranks)}


@given(lengths=st.lists(st.integers(1, 12), max_size=7), slack=st.integers(0, 6))
def test_decreasing_algorithms_keep_their_bounds(lengths: list[int], slack: int) -> None:
    capacity = max(lengths, default=1) + slack
    best = fewest(lengths, capacity)
    assert len(first_fit_decreasing(lengths, capacity)) <= 11 / 9 * best + 2 / 3
    assert len(ALGORITHMS["modified_first_fit_decreasing"](lengths, capacity)) <= 71 / 60 * best + 1


def test_algorithms_by_hand() -> None:
    lengths = [4, 8, 1, 4, 2, 1]
    assert ALGORITHMS["concatenative"](lengths, 10) == [[0], [1, 2], [3, 4, 5]]
    assert first_fit_decreasing(lengths, 10) == [[1, 4], [0, 3, 2, 5]]


def test_modified_algorithm_saves_a_pack_where_the_plain_one_fills_badly() -> None:
    """The best is 9: 51 + 26 + 23 six times, 27 + 27 + 23 + 23 three times. Plain: 51 + 27 leaves room for no other."""
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert len(first_fit_decreasing(lengths, 100)) == 11
    assert len(ALGORITHMS["modified_first_fit_decreasing"](lengths, 100)) == 10


def test_modified_algorithm_by_hand() -> None:
    """A medium sequence that fits exactly is preferred to two small ones; then the longest that fit fill the rest."""
    pack = ALGORITHMS["modified_first_fit_decreasing"]
    assert pack([60, 40, 20, 20], 100) == [[0, 1], [2, 3]]
    assert pack([60, 16, 10, 15], 100) == [[0, 1, 3], [2]]


def test_a_pack_may_be_exactly_full() -> None:
    """Balanced, 7 + 3 and 4 + 3 + 3; as they were fitted the 7 is with the first of the threes."""
    assert pack_for_ranks([7, 4, 3, 3, 3], 10, "first_fit_decreasing") == [[[0, 3], [1, 2, 4]]]


def test_ranks_take_turns_at_the_fullest_pack() -> None:
    assert pack_for_ranks([10, 9, 8, 7], 10, "first_fit_decreasing", 2) == [[[0], [3]], [[1], [2]]]


def test_sequences_are_dealt_out_evenly() -> None:
    assert pack_for_ranks([5, 4, 3, 2], 7, "first_fit_decreasing") == [[[0, 3], [1, 2]]]
    assert pack_for_ranks([5, 4, 3, 2], 7, "first_fit_decreasing", 2) == [[[0, 3]], [[1, 2]]]
    assert pack_for_ranks([5, 5, 5], 20, "first_fit_decreasing", 2) == [[[0, 2]], [[1]]]
    assert pack_for_ranks([5], 20, "first_fit_decreasing", 3) == [[[0]], [[]], [[]]]
    assert pack_for_ranks([], 20, "first_fit_decreasing", 2) == [[], []]


def test_packs_that_cannot_be_level_stay_as_they_were_fitted() -> None:
    """6 + 4, 5 + 5 and 3 + 3 + 3 fill three packs; 4 does not fit beside any pack that levelling makes."""
    lengths = [6, 5, 5, 4, 3, 3, 3]
    assert max(tokens(balance(lengths, 3), lengths)) > 10
    assert sorted(tokens(pack_for_ranks(lengths, 10, "first_fit_decreasing")[0], lengths)) == [9, 10, 10]
    assert [len(packs) for packs in pack_for_ranks(lengths, 10, "first_fit_decreasing", 2)] == [2, 2]


def test_a_pack_of_one_long_sequence_is_not_halved_and_a_fuller_one_goes_first() -> None:
    assert split_packs(3, [[0, 1, 2], [3, 4]], [1, 1, 1, 5, 4]) == [[0, 1, 2], [3], [4]]


def test_fullest_pack_is_halved_for_a_rank_without_one() -> None:
    lengths = [4, 4, 2, 7]
    assert split_packs(3, [[0, 1, 2], [3]], lengths) == [[3], [0, 2], [1]]
    assert split_packs(3, [[3]], lengths) == [[3], [], []]


def test_tokens_of_ranks_are_level_on_heavy_tails() -> None:
    draw = random.Random(0)
    lengths = [min(4096, int(draw.lognormvariate(6, 1)) + 1) for _ in range(2048)]
    ranks = pack_for_ranks(lengths, 8192, "modified_first_fit_decreasing", 8)
    of_ranks = [sum(tokens(packs, lengths)) for packs in ranks]
    assert max(of_ranks) / min(of_ranks) < 1.01
