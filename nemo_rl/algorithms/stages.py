"""The stages of a step between rollouts and optimizer; each adds its keys to the batch."""

from collections.abc import Mapping

from nemo_rl import batch as keys
from nemo_rl.algorithms.logprob_errors import mask_logprob_errors
from nemo_rl.algorithms.metrics import batch_metrics
from nemo_rl.algorithms.rewards import filter_overlong, shaped_rewards
from nemo_rl.algorithms.run import GRPORun, LogprobsNeeded
from nemo_rl.experience.assembly import TrajectoryKey, assemble_batch
from nemo_rl.interfaces import CollectedGroups, Policy
from nemo_rl.types import TrainingBatch


def train_rewards(run: GRPORun, collected: CollectedGroups) -> dict[TrajectoryKey, float]:
    """The rewards to train on: scaled and shaped where asked."""
    return shaped_rewards(collected.groups, run.config.grpo, run.config.policy.max_response_length)


def make_batch(run: GRPORun, collected: CollectedGroups, rewards: Mapping[TrajectoryKey, float]) -> TrainingBatch:
    """Assemble the batch; truncated rollouts lose their gradient where asked."""
    batch = assemble_batch(collected.groups, rewards, min_group_size=run.config.min_group_size)
    if run.config.grpo.overlong_filtering:
        filter_overlong(batch)
    return batch


async def add_logprobs(batch: TrainingBatch, policy: Policy, needed: LogprobsNeeded) -> None:
    if needed.previous:
        batch[keys.PREV_LOGPROBS] = await policy.logprobs(batch)
    if needed.reference:
        batch[keys.REFERENCE_LOGPROBS] = await policy.reference_logprobs(batch)


def estimate_advantages(run: GRPORun, batch: TrainingBatch) -> dict[str, float]:
    """Take out sequences whose log-probs disagree, add the advantages; metrics of the batch."""
    threshold = run.config.grpo.seq_logprob_error_threshold
    metrics = {} if threshold is None else mask_logprob_errors(batch, threshold)
    batch[keys.ADVANTAGES] = run.advantage_estimator(batch)
    return metrics | batch_metrics(batch)
