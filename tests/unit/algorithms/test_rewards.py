import pytest

from nemo_rl import batch as keys
from nemo_rl.algorithms.rewards import filter_overlong, scale_rewards, shape_rewards, transform_rewards
from nemo_rl.config.algorithm import GRPOConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.errors import ConfigError
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.types import StopReason, TrajectoryGroup
from tests.unit.algorithms.rollouts import PROMPT, make_group, make_trajectory


def test_scaling_clamps_then_maps_linearly() -> None:
    scaling = RewardScalingConfig(source_min=0, source_max=1, target_min=-1, target_max=1)
    assert scale_rewards([-2.0, 0.0, 0.25, 1.0, 3.0], scaling) == [-1.0, -1.0, -0.5, 1.0, 1.0]


def test_scaling_from_an_empty_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="source_max"):
        scale_rewards([1.0], RewardScalingConfig(source_min=1, source_max=1))


def test_overlong_penalty_grows_linearly_in_the_buffer() -> None:
    shaping = RewardShapingConfig(overlong_buffer_length=20, overlong_buffer_penalty=1.0, max_response_length=100)
    assert shape_rewards([1.0] * 4, [10, 80, 90, 100], shaping, None) == [1.0, 1.0, 0.5, 0.0]


def test_own_max_response_length_goes_before_the_engines() -> None:
    shaping = RewardShapingConfig(overlong_buffer_length=10, max_response_length=20)
    assert shape_rewards([0.0], [20], shaping, 1000) == [-1.0]
    assert shape_rewards([0.0], [20], RewardShapingConfig(overlong_buffer_length=10), 1000) == [0.0]


def test_shaping_without_a_maximum_or_with_a_larger_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_response_length"):
        shape_rewards([0.0], [1], RewardShapingConfig(), None)
    with pytest.raises(ConfigError, match="overlong_buffer_length"):
        shape_rewards([0.0], [1], RewardShapingConfig(overlong_buffer_length=11), 10)


def test_rewards_are_scaled_before_they_are_shaped_and_failures_have_none() -> None:
    members = (
        make_trajectory({"right": 0.5, "format": 0.5}, num_generated=10),
        make_trajectory(None, index=1),
        make_trajectory(0.0, index=2, num_generated=4),
    )
    config = GRPOConfig(
        reward_scaling=RewardScalingConfig(enabled=True, target_max=10.0),
        reward_shaping=RewardShapingConfig(enabled=True, overlong_buffer_length=5, overlong_buffer_penalty=2.0),
    )
    rewards = transform_rewards([TrajectoryGroup("g", PROMPT, members)], config, 10)
    assert rewards == {("g", 0): 8.0, ("g", 2): 0.0}


def test_rewards_are_left_alone_where_nothing_is_enabled() -> None:
    assert transform_rewards([make_group([0.5, 3.0])], GRPOConfig(), None) == {("g", 0): 0.5, ("g", 1): 3.0}


def test_overlong_filtering_takes_the_gradient_of_truncated_trajectories_alone() -> None:
    members = tuple(
        make_trajectory(1.0, index=i, stop_reason=reason)
        for i, reason in enumerate([StopReason.DONE, StopReason.TRUNCATED, StopReason.MAX_TURNS])
    )
    batch, _ = assemble_batch([TrajectoryGroup("g", PROMPT, members)], min_group_size=2)
    assert filter_overlong(batch) == 1
    assert batch[keys.SAMPLE_MASK].tolist() == [1.0, 0.0, 1.0]
    assert batch[keys.REWARD].tolist() == [1.0, 1.0, 1.0]
