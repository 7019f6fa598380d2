"""Supervised training on conversations: the cross-entropy over all trained tokens."""

from collections.abc import Sequence

from nemo_rl import nemo_rl_names
from nemo_rl.data.supervised import Sample, make_supervised_batch
from nemo_rl.interfaces import Policy
from nemo_rl.losses.supervised import NegativeLogLikelihood, negative_log_likelihood
from nemo_rl.policy.micro_batches import loss_mask
from nemo_rl.types import TrainingBatch


class SFTObjective:
    """The likelihood of the conversations' trained tokens; satisfies `supervised.Objective`."""

    loss_fn = NegativeLogLikelihood()

    def make_batch(self, samples: Sequence[Sample]) -> TrainingBatch:
        """Return the conversations as a batch."""
        return make_supervised_batch(samples)

    async def add_logprobs(self, policy: Policy, batch: TrainingBatch) -> None:
        """Add nothing."""

    async def validation_sums(self, policy: Policy, batch: TrainingBatch) -> tuple[dict[str, float], float]:
        """Return the cross-entropy summed over the trained tokens, and their number."""
        loss = float(negative_log_likelihood(await policy.logprobs(batch), batch))
        return {"loss": loss}, float(loss_mask(batch).sum())


__getattr__ = nemo_rl_names.refuse(__name__)
