"""Stages of a GRPO step: rewards and their shaping, sequences masked by log-probs."""

import math

import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.grpo import (
    filter_overlong,
    mask_logprob_errors,
    scale_rewards,
    shape_rewards,
    transform_rewards,
)
from nemo_rl.config.master import (
    GRPOConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from nemo_rl.errors import ConfigError
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.types import StopReason, TrajectoryGroup
from tests.unit.algorithms.batches import make_batch
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


def test_rewards_of_truncated_rollouts_alone_are_multiplied_by_the_coefficient() -> None:
    members = (
        make_trajectory(1.0, num_generated=10),
        make_trajectory(0.8, index=1, stop_reason=StopReason.TRUNCATED),
        make_trajectory(0.6, index=2, stop_reason=StopReason.MAX_TURNS),
    )
    config = GRPOConfig(reward_shaping=RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25))
    rewards = transform_rewards([TrajectoryGroup("g", PROMPT, members)], config, 10)
    assert rewards == {("g", 0): 1.0, ("g", 1): 0.2, ("g", 2): 0.6}


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


def test_sequences_above_the_threshold_lose_their_gradient() -> None:
    batch = make_batch(
        [[0, 1, 1], [0, 1, 1], [0, 1, 0]],
        rewards=[1.0, 0.0, 1.0],
        prev_logprobs=[[9.0, -1.0, -1.0], [0.0, -1.0, -1.0], [0.0, -1.0, 9.0]],
        generation_logprobs=[[0.0, -1.5, -0.9], [0.0, -1.1, -1.0], [0.0, -1.2, 0.0]],
    )
    metrics = mask_logprob_errors(batch, 1.25)
    assert batch[keys.SAMPLE_MASK].tolist() == [0.0, 1.0, 1.0]
    assert metrics == pytest.approx(
        {
            "max_seq_mult_prob_error": (math.exp(0.5) + math.exp(0.1)) / 2,
            "mean_seq_mult_prob_error": ((math.exp(0.5) + math.exp(0.1)) / 2 + (math.exp(0.1) + 1) / 2 + math.exp(0.2))
            / 3,
            "max_seq_mult_prob_error_after_mask": math.exp(0.2),
            "num_masked_seqs_by_logprob_error": 1.0,
            "masked_correct_pct": 1.0,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_sequence_with_a_logprob_that_is_no_number_is_masked(logprob: float) -> None:
    batch = make_batch([[0, 1], [0, 1]], prev_logprobs=[[0.0, 0.0]] * 2, generation_logprobs=[[0, 0], [0, logprob]])
    metrics = mask_logprob_errors(batch, 2.0)
    assert batch[keys.SAMPLE_MASK].tolist() == [1.0, 0.0]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["max_seq_mult_prob_error"] == torch.finfo(torch.float32).max
    assert metrics["max_seq_mult_prob_error_after_mask"] == 1


def test_samples_without_gradient_are_not_counted() -> None:
    batch = make_batch([[0, 1]], prev_logprobs=[[0.0, -5.0]], sample_mask=[0.0])
    metrics = mask_logprob_errors(batch, 2.0)
    assert metrics["num_masked_seqs_by_logprob_error"] == 0
    assert metrics["max_seq_mult_prob_error"] == metrics["mean_seq_mult_prob_error"] == 1


def test_a_sequence_at_the_threshold_keeps_its_gradient() -> None:
    batch = make_batch([[0, 1], [0, 1]], prev_logprobs=[[0.0, -1.0], [0.0, -1.5]], generation_logprobs=[[0, -1.0]] * 2)
    mask_logprob_errors(batch, 1.0)
    assert batch[keys.SAMPLE_MASK].tolist() == [1.0, 0.0]


def test_one_token_that_is_far_off_is_not_averaged_away() -> None:
    """999 exact tokens and one with |e| = 8: (999 + e^8) / 1000 = 3.98, where exp of the mean is 1.008."""
    batch = make_batch([[0, *[1] * 1000]], prev_logprobs=[[0.0] * 1000 + [-8.0]])
    metrics = mask_logprob_errors(batch, 2.0)
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(3.97996, abs=1e-5)
    assert metrics["num_masked_seqs_by_logprob_error"] == 1
    assert batch[keys.SAMPLE_MASK].tolist() == [0.0]


def test_a_sequence_without_trained_tokens_is_in_no_mean_and_keeps_its_weight() -> None:
    batch = make_batch([[0, 1], [0, 0]], prev_logprobs=[[0.0, -math.log(1.5)], [0.0, 0.0]])
    metrics = mask_logprob_errors(batch, 2.0)
    assert metrics["mean_seq_mult_prob_error"] == pytest.approx(1.5)
    assert batch[keys.SAMPLE_MASK].tolist() == [1.0, 1.0]
