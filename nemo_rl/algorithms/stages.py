"""The stages of a GRPO step between rollouts and optimizer; each adds its keys to the batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.logprob_errors import mask_logprob_errors
from nemo_rl.algorithms.metrics import batch_metrics
from nemo_rl.algorithms.penalties import Penalties, StepFaults
from nemo_rl.algorithms.rewards import filter_overlong, transform_rewards
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.experience.assembly import TrajectoryKey, assemble_batch
from nemo_rl.interfaces import AdvantageEstimator, CollectedGroups, Policy
from nemo_rl.types import TrainingBatch


@dataclass(frozen=True, slots=True)
class RequiredLogprobs:
    """The passes over a batch before it is trained on: only those that someone reads."""

    previous: bool
    reference: bool


@dataclass(frozen=True, slots=True)
class TrainRewards:
    """The rewards to train on, and the faults that some of them were lost for."""

    by_trajectory: Mapping[TrajectoryKey, float]
    faults: StepFaults


def compute_train_rewards(
    config: GRPORunConfig, penalties: Penalties | None, collected: CollectedGroups
) -> TrainRewards:
    """The rewards to train on: penalised, scaled and shaped where asked."""
    faults = StepFaults() if penalties is None else penalties.faults(collected.groups)
    rewards = transform_rewards(
        collected.groups,
        config.grpo,
        config.policy.max_response_length,
        zero_reward_rollouts=faults.zero_reward_rollouts,
    )
    return TrainRewards(rewards, faults)


def assemble_train_batch(config: GRPORunConfig, collected: CollectedGroups, rewards: TrainRewards) -> TrainingBatch:
    """Assemble the batch; truncated rollouts lose their gradient where asked."""
    groups, min_group_size = collected.groups, config.min_group_size
    batch = assemble_batch(groups, rewards.by_trajectory, min_group_size=min_group_size)
    if config.grpo.overlong_filtering:
        filter_overlong(batch)
    shape = batch[keys.TOKEN_IDS].shape
    override = rewards.faults.advantage_override(groups, min_group_size=min_group_size, shape=shape)
    if override is not None:
        batch[keys.ADVANTAGE_OVERRIDE] = override
    return batch


async def add_logprobs(batch: TrainingBatch, policy: Policy, needed: RequiredLogprobs) -> None:
    if needed.previous:
        batch[keys.PREV_LOGPROBS] = await policy.logprobs(batch)
    if needed.reference:
        batch[keys.REFERENCE_LOGPROBS] = await policy.reference_logprobs(batch)


def estimate_advantages(config: GRPORunConfig, estimator: AdvantageEstimator, batch: TrainingBatch) -> dict[str, float]:
    """Take out sequences whose log-probs disagree, add the advantages; metrics of the batch."""
    threshold = config.grpo.seq_logprob_error_threshold
    metrics = {} if threshold is None else mask_logprob_errors(batch, threshold)
    batch[keys.ADVANTAGES] = estimator(batch)
    if batch.get(keys.ADVANTAGE_OVERRIDE, None) is not None:
        override = batch[keys.ADVANTAGE_OVERRIDE]
        batch[keys.ADVANTAGES] = torch.where(override.isnan(), batch[keys.ADVANTAGES], override)
        del batch[keys.ADVANTAGE_OVERRIDE]
    return metrics | batch_metrics(batch)
