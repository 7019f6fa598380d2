"""The objectives of supervised training: the likelihood of conversations (SFT), and preferences (DPO).

DPO is arXiv:2305.18290: its frozen reference is the policy before training, whose log-probs of each batch are computed
just before the step.
"""

from collections.abc import Sequence

import torch

from nemo_rl import batch as keys
from nemo_rl.config.supervised_runs import DPOConfig
from nemo_rl.data.supervised_samples import TokenizedExample, make_pair_batch, make_supervised_batch
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.interfaces import Policy
from nemo_rl.loss_types import TokenScores
from nemo_rl.losses.likelihood import NegativeLogLikelihood, negative_log_likelihood
from nemo_rl.losses.preference import PreferenceLoss
from nemo_rl.policy.micro_batches import count_valid, loss_mask
from nemo_rl.types import TrainingBatch


class SFTObjective:
    """The likelihood of the conversations' trained tokens; satisfies `supervised_loop.Objective`."""

    loss_fn = NegativeLogLikelihood()

    def __init__(self, images: ImageEncoder | None = None) -> None:
        """`images` encodes those of conversations; None if the policy reads text."""
        self._images = images

    def make_batch(self, samples: Sequence[TokenizedExample]) -> TrainingBatch:
        """Return the conversations as a batch."""
        return make_supervised_batch(samples, self._images)

    async def add_logprobs(self, policy: Policy, batch: TrainingBatch) -> None:
        """Add nothing."""

    async def validation_sums(self, policy: Policy, batch: TrainingBatch) -> tuple[dict[str, float], float]:
        """Return the cross-entropy summed over the trained tokens, and their number."""
        loss = float(negative_log_likelihood(await policy.logprobs(batch), batch))
        return {"loss": loss}, float(loss_mask(batch).sum())


class DPOObjective:
    """The preference loss over pairs; satisfies `supervised_loop.Objective`."""

    def __init__(self, section: DPOConfig, images: ImageEncoder | None = None) -> None:
        """`images` encodes those of prompts; None if the policy reads text."""
        self.loss_fn = PreferenceLoss(section)
        self._images = images

    def make_batch(self, samples: Sequence[TokenizedExample]) -> TrainingBatch:
        """Return the pairs as a batch of twice as many rows."""
        return make_pair_batch(samples, self._images)

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
