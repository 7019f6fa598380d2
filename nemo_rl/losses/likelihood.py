"""The loss of SFT: the negative log-likelihood of trained tokens."""

import torch

from nemo_rl import batch as keys
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy.micro_batches import loss_mask
from nemo_rl.types import TrainingBatch


class NegativeLogLikelihood:
    """`-sum(lp * mask) / number of valid tokens` of the optimizer step: the cross-entropy over all trained tokens.

    Any split into micro-batches or ranks adds up to the same loss and gradient.

    Example: log-probs -1, -2 and -4, of which the last is masked, give 1.5.
    """

    @property
    def required_keys(self) -> frozenset[str]:
        return frozenset({keys.TOKEN_MASK, keys.SAMPLE_MASK})

    @property
    def required_scores(self) -> RequiredScores:
        """Return that log-probs of the tokens themselves are enough."""
        return RequiredScores()

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        return negative_log_likelihood(scores.logprobs, batch) / max(normalizer.num_valid_tokens, 1.0), {}


def negative_log_likelihood(logprobs: torch.Tensor, batch: TrainingBatch) -> torch.Tensor:
    """Return `-sum(lp * mask)` of log-probs [B, T], a scalar."""
    return -(logprobs * loss_mask(batch)).sum()
