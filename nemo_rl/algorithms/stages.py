"""The stages of a GRPO step between rollouts and optimizer; each adds its keys to the batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantages import TrajectoryIndex, clip_advantages
from nemo_rl.algorithms.rewards import Penalties, StepFaults, filter_overlong, transform_rewards
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.experience.assembly import BatchRow, TrajectoryKey, assemble_batch
from nemo_rl.interfaces import AdvantageEstimator, CollectedGroups, Policy
from nemo_rl.types import TrainingBatch


def sequence_logprob_errors(batch: TrainingBatch) -> torch.Tensor:
    """Return exp(mean over the sampled tokens of |lp_prev - lp_gen|) of each sample: [B]; NaN where a log-prob is."""
    mask = batch[keys.TOKEN_MASK]
    error = torch.where(mask > 0, (batch[keys.PREV_LOGPROBS] - batch[keys.GENERATION_LOGPROBS]).abs(), 0.0)
    return torch.exp(error.sum(-1) / mask.sum(-1).clamp(min=1))


@torch.no_grad()
def mask_logprob_errors(batch: TrainingBatch, threshold: float) -> dict[str, float]:
    """Set `sample_mask` to 0 where a sequence's error exceeds `grpo.seq_logprob_error_threshold`, or is NaN.

    Metrics are over the samples with a gradient: max_ and mean_seq_mult_prob_error before and
    max_seq_mult_prob_error_after_mask after it, num_masked_seqs_by_logprob_error, and masked_correct_pct, the share
    of the masked samples that had a positive reward (0..1; 0 where none was masked).
    """
    errors = sequence_logprob_errors(batch)
    trained = batch[keys.SAMPLE_MASK] > 0
    kept = trained & (errors <= threshold)
    masked = trained & ~kept
    batch[keys.SAMPLE_MASK] = batch[keys.SAMPLE_MASK] * kept
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
    """Return the largest error; 1, no error at all, where there is no sequence."""
    return float(errors.max()) if len(errors) else 1.0


@torch.no_grad()
def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    """Return the metrics of a batch, named as in docs/metrics.md without their prefix.

    `reward` and `filtered_reward` are the mean raw reward of the batch's trajectories; where dynamic sampling drops
    groups, the source replaces `reward` by the mean over all of them. `shaped_reward` is what the advantages are
    computed from. Advantages are over the valid tokens; 0 where there is none.
    """
    mask = batch[keys.TOKEN_MASK]  # [B, T]
    trajectories = TrajectoryIndex.of(batch)
    raw = torch.zeros_like(batch[keys.REWARD])  # [B]
    for component in batch[keys.REWARD_COMPONENTS].values():
        raw = raw + component
    raw = raw[trajectories.first_sample].double()  # [N]
    steps = torch.arange(mask.shape[1], device=mask.device)
    # The prompt ends at the first sampled token, or with the sequence where none was sampled.
    prompt_lengths = torch.where(mask > 0, steps, batch[keys.LENGTHS][:, None]).amin(-1)
    metrics = {
        "reward": float(raw.mean()),
        "filtered_reward": float(raw.mean()),
        "shaped_reward": float(trajectories.first(keys.REWARD).mean()),
        "mean_prompt_length": float(prompt_lengths[trajectories.first_sample].double().mean()),
        "total_num_tokens": float(batch[keys.LENGTHS].sum()),
    }
    advantages = batch.get(keys.ADVANTAGES, None)
    if advantages is not None:
        advantages = advantages[(mask * batch[keys.SAMPLE_MASK][:, None]) > 0].double()
        has_tokens = len(advantages) > 0
        metrics |= {
            "advantages/mean": float(advantages.mean()) if has_tokens else 0.0,
            "advantages/max": float(advantages.max()) if has_tokens else 0.0,
            "advantages/min": float(advantages.min()) if has_tokens else 0.0,
        }
    return metrics


@dataclass(frozen=True, slots=True)
class RequiredLogprobs:
    """Forward passes over a batch before training: only those that something reads."""

    previous: bool
    reference: bool


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
