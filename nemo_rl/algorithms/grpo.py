"""GRPO and its relatives: the stages between rollouts and optimizer, in the order of `GRPO.make_batch`.

Rewards are penalised, scaled and shaped, groups become a batch, log-probs and advantages are added. The environment's
own rewards stay on the trajectories; dynamic sampling and the reward components see those.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantages import batch_metrics, clip_advantages
from nemo_rl.algorithms.placement import Placement
from nemo_rl.algorithms.reward_penalties import Penalties, StepFaults
from nemo_rl.algorithms.stages import StepBatch, TeacherStage
from nemo_rl.config.kinds import foreign_names
from nemo_rl.config.master import GRPOConfig, GRPORunConfig, RewardScalingConfig, RewardShapingConfig
from nemo_rl.errors import ConfigError
from nemo_rl.experience.assembly import BatchRow, TrajectoryKey, assemble_batch, trajectory_key
from nemo_rl.interfaces import AdvantageEstimator, LossFn, Policy
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import CollectedGroups, StopReason, TrainingBatch, TrajectoryGroup

__getattr__ = foreign_names(__name__)


@dataclass(frozen=True, slots=True)
class RequiredLogprobs:
    """Forward passes over a batch before training: only those that something reads."""

    previous: bool
    reference: bool


@dataclass(frozen=True, slots=True)
class GRPO:
    """The stages of a step in their order; satisfies stages.Algorithm."""

    config: GRPORunConfig
    loss_fn: LossFn
    advantage_estimator: AdvantageEstimator
    required_logprobs: RequiredLogprobs
    policy: Policy
    placement: Placement
    teacher_stage: TeacherStage | None = None  # if the advantages read teachers
    penalties: Penalties | None = None  # penalties of faulty replies

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> StepBatch:
        with timer("reward_calculation"):
            rewards = compute_train_rewards(self.config, self.penalties, collected)
        with timer("data_processing"):
            batch, rows = assemble_train_batch(self.config, collected, rewards)
        if self.teacher_stage is not None:
            with timer("teacher_logprobs"):
                async with self.placement.teacher_phase():
                    await self.teacher_stage(batch, rows)
        with timer("policy_and_reference_logprobs"):
            if self.teacher_stage is None:
                await self.placement.prepare_for_training()
            await add_logprobs(batch, self.policy, self.required_logprobs)
        with timer("advantage_calculation"):
            metrics = estimate_advantages(self.config, self.advantage_estimator, batch)
        return StepBatch(batch, rows, {**metrics, **rewards.faults.metrics, **collected.metrics})


@dataclass(frozen=True, slots=True)
class TrainRewards:
    """The rewards to train on, and the faults that set some of them to 0."""

    by_trajectory: Mapping[TrajectoryKey, float]
    faults: StepFaults


def compute_train_rewards(
    config: GRPORunConfig, penalties: Penalties | None, collected: CollectedGroups
) -> TrainRewards:
    """Return the rewards to train on: penalised, scaled and shaped as configured."""
    faults = StepFaults() if penalties is None else penalties.faults(collected.groups)
    rewards = transform_rewards(
        collected.groups,
        config.grpo,
        config.policy.max_response_length,
        zero_reward_rollouts=faults.zero_reward_rollouts,
    )
    return TrainRewards(rewards, faults)


def assemble_train_batch(
    config: GRPORunConfig, collected: CollectedGroups, rewards: TrainRewards
) -> tuple[TrainingBatch, tuple[BatchRow, ...]]:
    """Return the batch and the origin of its rows; with `overlong_filtering` truncated rollouts carry no gradient."""
    batch, rows = assemble_batch(collected.groups, rewards.by_trajectory, min_group_size=config.min_group_size)
    if config.grpo.overlong_filtering:
        filter_overlong(batch)
    override = rewards.faults.advantage_override(rows, shape=batch[keys.TOKEN_IDS].shape)
    if override is not None:
        batch[keys.ADVANTAGE_OVERRIDE] = override
    return batch, rows


async def add_logprobs(batch: TrainingBatch, policy: Policy, needed: RequiredLogprobs) -> None:
    """Add the log-probs of the policy and of its reference that are needed."""
    if needed.previous:
        batch[keys.PREV_LOGPROBS] = await policy.logprobs(batch)
    if needed.reference:
        batch[keys.REFERENCE_LOGPROBS] = await policy.reference_logprobs(batch)


def estimate_advantages(config: GRPORunConfig, estimator: AdvantageEstimator, batch: TrainingBatch) -> dict[str, float]:
    """Mask sequences whose log-probs disagree, add the advantages; return metrics of the batch."""
    threshold = config.grpo.seq_logprob_error_threshold
    metrics = {} if threshold is None else mask_logprob_errors(batch, threshold)
    batch[keys.ADVANTAGES] = clip_advantages(
        estimator(batch), config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    )
    if batch.get(keys.ADVANTAGE_OVERRIDE, None) is not None:
        override = batch[keys.ADVANTAGE_OVERRIDE]
        batch[keys.ADVANTAGES] = torch.where(override.isnan(), batch[keys.ADVANTAGES], override)
        del batch[keys.ADVANTAGE_OVERRIDE]
    return metrics | batch_metrics(batch)


def sequence_logprob_errors(batch: TrainingBatch) -> torch.Tensor:
    """Return the mean over the sampled tokens of exp(|lp_prev - lp_gen|) of each sample: [B].

    NaN or infinite if a log-prob is; 1, no error, for a sample without sampled tokens.

    Example: of 1,000 tokens one has |e| = 8: (999 + e^8) / 1000 = 3.98.
    """
    mask = batch[keys.TOKEN_MASK]
    error = (batch[keys.PREV_LOGPROBS] - batch[keys.GENERATION_LOGPROBS]).abs().double()
    count = mask.sum(-1)
    mean = torch.where(mask > 0, error.exp(), 0.0).sum(-1) / count.clamp(min=1)
    return torch.where(count > 0, mean, 1.0).float()


@torch.no_grad()
def mask_logprob_errors(batch: TrainingBatch, threshold: float) -> dict[str, float]:
    """Set `sample_mask` to 0 if a sequence's error exceeds `grpo.seq_logprob_error_threshold`, or is NaN.

    Metrics are over the samples with a gradient and a sampled token: max_ and mean_seq_mult_prob_error before and
    max_seq_mult_prob_error_after_mask after it, num_masked_seqs_by_logprob_error, and masked_correct_pct, the share
    of the masked samples that had a positive reward (0..1; 0 if none was masked).
    """
    errors = sequence_logprob_errors(batch)
    trained = (batch[keys.SAMPLE_MASK] > 0) & (batch[keys.TOKEN_MASK].sum(-1) > 0)
    kept = trained & (errors <= threshold)
    masked = trained & ~kept
    batch[keys.SAMPLE_MASK] = batch[keys.SAMPLE_MASK] * ~masked
    correct = masked & (batch[keys.REWARD] > 0)
    finite = torch.nan_to_num(errors, nan=torch.finfo(errors.dtype).max)
    return {
        "max_seq_mult_prob_error": _max(finite[trained]),
        "mean_seq_mult_prob_error": float(finite[trained].double().mean()) if trained.any() else 1.0,
        "max_seq_mult_prob_error_after_mask": _max(finite[kept]),
        "num_masked_seqs_by_logprob_error": float(masked.sum()),
        "masked_correct_pct": float(correct.sum() / masked.sum().clamp(min=1)),
    }


def _max(errors: torch.Tensor) -> float:
    """Return the largest error; 1, no error at all, if there is no sequence."""
    return float(errors.max()) if len(errors) else 1.0


def transform_rewards(
    groups: Sequence[TrajectoryGroup],
    config: GRPOConfig,
    max_response_length: int | None,
    *,
    zero_reward_rollouts: Container[TrajectoryKey] = frozenset(),
) -> dict[TrajectoryKey, float]:
    """Return the rewards to train on of all survivors and baselines: scaled, then shaped, if enabled.

    Penalised rollouts, `zero_reward_rollouts`, have the reward 0 before that, unless their own is lower.
    `max_response_length`, in tokens, is the default of `reward_shaping.max_response_length`. With
    `stop_properly_penalty_coef`, rewards of truncated rollouts are multiplied by it, and lengths do not count.
    """
    scored = [t for group in groups for t in group.scored]
    rewards = [min(t.reward, 0.0) if trajectory_key(t) in zero_reward_rollouts else t.reward for t in scored]
    if config.reward_scaling.enabled:
        rewards = scale_rewards(rewards, config.reward_scaling)
    coefficient = config.reward_shaping.stop_properly_penalty_coef
    if config.reward_shaping.enabled and coefficient is not None:
        truncated = (t.stop_reason is StopReason.TRUNCATED for t in scored)
        rewards = [reward * coefficient if cut else reward for reward, cut in zip(rewards, truncated, strict=True)]
    elif config.reward_shaping.enabled:
        lengths = [t.num_generated_tokens for t in scored]
        rewards = shape_rewards(rewards, lengths, config.reward_shaping, max_response_length)
    return {trajectory_key(t): reward for t, reward in zip(scored, rewards, strict=True)}


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
    """Mask truncated trajectories, which stay in the baseline; return the number of masked samples."""
    truncated = batch[keys.TRUNCATED]
    batch[keys.SAMPLE_MASK] = batch[keys.SAMPLE_MASK].masked_fill(truncated, 0.0)
    return int(truncated.sum())
