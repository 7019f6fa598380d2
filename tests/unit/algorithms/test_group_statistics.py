import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.algorithms.advantages import baseline_and_std, divide_by_std, unbiased_std


def stats(rewards: list[float], groups: list[int], leave_one_out: bool = False) -> tuple[list[float], list[float]]:
    baseline, std = baseline_and_std(torch.tensor(rewards), torch.tensor(groups), leave_one_out=leave_one_out)
    return baseline.tolist(), std.tolist()


def test_leave_one_out_has_the_worked_values() -> None:
    baseline, std = stats([1.0, 2.0, 3.0], [0, 0, 0], leave_one_out=True)
    assert baseline == [2.5, 2.0, 1.5]
    assert std == pytest.approx([0.7071, 1.4142, 0.7071], abs=1e-4)


def test_groups_may_be_interleaved_and_of_different_sizes() -> None:
    baseline, std = stats([1.0, 10.0, 3.0, 20.0, 5.0], [0, 1, 0, 1, 0])
    assert baseline == [3.0, 15.0, 3.0, 15.0, 3.0]
    assert std == pytest.approx([2.0, 50**0.5, 2.0, 50**0.5, 2.0])


def test_a_group_of_one_is_its_own_baseline() -> None:
    for leave_one_out in (False, True):
        assert stats([4.0, 1.0, 2.0], [0, 1, 1], leave_one_out)[0][0] == 4.0
        assert stats([4.0, 1.0, 2.0], [0, 1, 1], leave_one_out)[1][0] == 0.0


def test_leave_one_out_of_two_has_no_std() -> None:
    assert stats([1.0, 3.0], [0, 0], leave_one_out=True) == ([3.0, 1.0], [0.0, 0.0])


def test_rounding_is_no_deviation() -> None:
    _, std = stats([0.1 + 0.2, 0.3, 0.3], [0, 0, 0])
    assert std == [0.0, 0.0, 0.0]
    assert unbiased_std(torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)) == 0
    _, std = stats([0.0, 0.3, 0.3, 0.3], [0] * 4, leave_one_out=True)
    assert std[0] == 0.0


def test_small_but_real_deviations_are_kept() -> None:
    _, std = stats([1.0, 1.0001], [0, 0])
    assert std[0] == pytest.approx(1e-4 / 2**0.5, rel=1e-3)


def test_zero_std_leaves_the_numbers_as_they_are() -> None:
    divided = divide_by_std(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 0.5]))
    assert divided.tolist() == pytest.approx([2.0, 4.0], rel=1e-5)


def test_unbiased_std_of_fewer_than_two_is_zero() -> None:
    assert unbiased_std(torch.tensor([])) == 0
    assert unbiased_std(torch.tensor([3.0])) == 0


@given(
    rewards=st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9),
    leave_one_out=st.booleans(),
)
def test_agrees_with_the_definition(rewards: list[float], leave_one_out: bool) -> None:
    baseline, std = stats(rewards, [0] * len(rewards), leave_one_out)
    for i, reward in enumerate(rewards):
        peers = rewards[:i] + rewards[i + 1 :] if leave_one_out else rewards
        assert baseline[i] == pytest.approx(statistics.fmean(peers) if peers else reward)
        assert std[i] == pytest.approx(statistics.stdev(peers) if len(peers) > 1 else 0.0, abs=1e-9)
