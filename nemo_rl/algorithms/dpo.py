"""Direct preference optimization (DPO, arXiv:2305.18290): the policy learns to prefer the chosen answers of pairs.

The frozen reference is the policy before training; its log-probs of each batch are computed just before the step.
"""

from collections.abc import Sequence

import torch

from nemo_rl import batch as keys
from nemo_rl import nemo_rl_names
from nemo_rl.config.supervised import DPOConfig
from nemo_rl.data.supervised import Sample, make_pair_batch
from nemo_rl.interfaces import Policy, TokenScores
from nemo_rl.losses.supervised import PreferenceLoss
from nemo_rl.policy.micro_batches import count_valid
from nemo_rl.types import TrainingBatch


class DPOObjective:
    """The preference loss over pairs; satisfies `supervised.Objective`."""

    def __init__(self, section: DPOConfig) -> None:
        self.loss_fn = PreferenceLoss(section)

    def make_batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """Return the pairs as a batch of twice as many rows."""
        return make_pair_batch(samples)

    async def add_logprobs(self, policy: Policy, batch: TrainingBatch) -> None:
        """Add the reference's log-probs."""
        batch[keys.REFERENCE_LOGPROBS] = await policy.reference_logprobs(batch)

    async def validation_sums(self, policy: Policy, batch: TrainingBatch) -> tuple[dict[str, float], float]:
        """Return loss and metrics summed over the pairs, and the number of pairs."""
        await self.add_logprobs(policy, batch)
        scores = TokenScores(await policy.logprobs(batch))
        loss, metrics = self.loss_fn(scores, batch, count_valid(batch, torch.arange(len(batch))))
        num_pairs = float(metrics.pop("num_valid_samples").value)
        means = {"loss": float(loss)} | {name: float(metric.value) for name, metric in metrics.items()}
        return {name: value * num_pairs for name, value in means.items()}, num_pairs


__getattr__ = nemo_rl_names.refuse(__name__)
