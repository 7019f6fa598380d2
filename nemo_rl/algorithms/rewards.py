"""What happens to rewards between the environment and the advantages: penalties, scaling, shaping, overlong filtering.

The environment's own rewards stay on the trajectories; dynamic sampling and the reward components see those.
"""

from collections.abc import Container, Sequence

from nemo_rl import batch as keys
from nemo_rl.config.algorithm import GRPOConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.errors import ConfigError
from nemo_rl.experience.assembly import TrajectoryKey, trajectory_key
from nemo_rl.types import TrainingBatch, TrajectoryGroup


def transform_rewards(
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    max_response_length: int | None,
    *,
    zero_reward_rollouts: Container[TrajectoryKey] = frozenset(),
) -> dict[TrajectoryKey, float]:
    """The rewards to train on of all trajectories that did not fail: scaled, then shaped, where enabled.

    Penalised rollouts, `zero_reward_rollouts`, have the reward 0 before that, unless their own is lower.
    `max_response_length`, in tokens, stands in for `reward_shaping.max_response_length` where that is None.
    """
    survivors = [t for group in groups for t in group.survivors]
    rewards = [min(t.reward, 0.0) if trajectory_key(t) in zero_reward_rollouts else t.reward for t in survivors]
    if config.reward_scaling.enabled:
        rewards = scale_rewards(rewards, config.reward_scaling)
    if config.reward_shaping.enabled:
        lengths = [t.num_generated_tokens for t in survivors]
        rewards = shape_rewards(rewards, lengths, config.reward_shaping, max_response_length)
    return {trajectory_key(t): reward for t, reward in zip(survivors, rewards, strict=True)}


def scale_rewards(rewards: Sequence[float], scaling: RewardScalingConfig) -> list[float]:
    """Clamp to the source range, then map it linearly to the target range.

    Example: source 0..1, target -1..1: rewards [0, .5, 3] become [-1, 0, 1].
    """
    source_range = scaling.source_max - scaling.source_min
    if source_range <= 0:
        raise ConfigError("grpo.reward_scaling.source_max", scaling.source_max, "must be above source_min")
    slope = (scaling.target_max - scaling.target_min) / source_range
    clamped = (min(max(reward, scaling.source_min), scaling.source_max) for reward in rewards)
    return [scaling.target_min + slope * (reward - scaling.source_min) for reward in clamped]


def shape_rewards(
    rewards: Sequence[float],
    response_lengths: Sequence[int],
    shaping: RewardShapingConfig,
    max_response_length: int | None,
) -> list[float]:
    """Add DAPO's overlong penalty (arXiv 2503.14476): min(-(length - (max - buffer)) / buffer * penalty, 0).

    Lengths are generated tokens, over all turns. Example: max 100, buffer 20, penalty 1: at lengths 80, 90, 100 the
    penalties are 0, -.5, -1.
    """
    longest = shaping.max_response_length or max_response_length
    if longest is None:
        raise ConfigError("grpo.reward_shaping.max_response_length", None, "needed, as max_new_tokens is not set")
    buffer = shaping.overlong_buffer_length
    if buffer > longest:
        raise ConfigError("grpo.reward_shaping.overlong_buffer_length", buffer, f"longer than a response, {longest}")
    return [
        reward + min(-(length - (longest - buffer)) / buffer * shaping.overlong_buffer_penalty, 0.0)
        for reward, length in zip(rewards, response_lengths, strict=True)
    ]


def filter_overlong(batch: TrainingBatch) -> int:
    """Take the gradient from truncated trajectories, which stay in the baseline; returns the samples it hit."""
    truncated = batch[keys.TRUNCATED]
    batch[keys.SAMPLE_MASK] = batch[keys.SAMPLE_MASK].masked_fill(truncated, 0.0)
    return int(truncated.sum())
