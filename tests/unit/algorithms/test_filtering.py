from nemo_rl.algorithms.advantages import is_informative
from nemo_rl.types import TrajectoryGroup
from tests.unit.algorithms.rollouts import PROMPT, make_group, make_trajectory


def names(*groups: TrajectoryGroup) -> list[str]:
    return [group.group_id for group in groups if is_informative(group)]


def test_groups_with_equal_rewards_are_dropped_and_order_is_kept() -> None:
    groups = [make_group([0.0, 1.0], "a"), make_group([1.0, 1.0], "b"), make_group([0.5, 0.4, 0.5], "c")]
    assert names(*groups) == ["a", "c"]


def test_failures_make_no_difference_between_rewards() -> None:
    assert names(make_group([1.0, None, 1.0])) == []
    assert names(make_group([1.0, None])) == []
    assert names(make_group([None, None])) == []


def test_the_total_counts_not_its_parts_and_rounding_is_no_difference() -> None:
    members = (make_trajectory({"a": 0.1, "b": 0.2}), make_trajectory({"a": 0.3}, index=1))
    assert names(TrajectoryGroup("g", PROMPT, members)) == []
