"""Divergence of the student's next-token distributions from the teacher's. Formulas, sources: docs/distillation.md.

B samples, T tokens, K of the teacher's most likely tokens; p the teacher, q the student.
"""

from dataclasses import dataclass

import torch

from nemo_rl import batch as keys
from nemo_rl.interfaces import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.losses.distillation import DistillationLossConfig
from nemo_rl.losses.policy_gradient import engine_mismatch_metrics
from nemo_rl.policy.micro_batches import loss_mask
from nemo_rl.types import TrainingBatch

LOG_ZERO = -100.0  # log p of what the teacher rules out: e^-100, so that reverse stays finite


@dataclass(frozen=True, slots=True)
class Divergences:
    """Both divergences of each token: [B, T]."""

    forward: torch.Tensor
    reverse: torch.Tensor


class TopKDivergence:
    """Sum over tokens of a divergence over the teacher's K tokens, each token over the step's count of them.

    forward = sum p (log p - log q), reverse = sum q (log q - log p), mixed = w forward + (1 - w) reverse.

    `zero_outside_topk: false`: p and q are renormalised over the K tokens. `true`: p is, and is e^-100 for all others;
    q is of the whole vocabulary, so reverse also has the sum over the others of q (log q + 100).
    """

    def __init__(self, config: DistillationLossConfig, *, is_on_policy: bool = True) -> None:
        """Set `is_on_policy` where responses are the student's samples, with log-probs of the engine to compare."""
        self.config = config
        self.is_on_policy = is_on_policy

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the masks and the teacher's tokens; on-policy also the engine's log-probs."""
        read = {keys.TOKEN_MASK, keys.SAMPLE_MASK, keys.TEACHER_TOPK_IDS, keys.TEACHER_TOPK_LOGPROBS}
        return frozenset(read | ({keys.GENERATION_LOGPROBS} if self.is_on_policy else set()))

    @property
    def required_scores(self) -> RequiredScores:
        """Return the teacher's tokens as candidates; the entropy where tokens outside them count."""
        return RequiredScores(candidates=keys.TEACHER_TOPK_IDS, entropy=self.config.zero_outside_topk)

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        mask, num_tokens = loss_mask(batch), max(normalizer.num_valid_tokens, 1.0)
        weights = mask / num_tokens  # [B, T]
        divergences = self._divergences(scores, batch)
        forward_weight = self.config.forward_weight
        loss = torch.zeros((), device=weights.device)
        if forward_weight > 0:
            loss = loss + forward_weight * (divergences.forward * weights).sum()
        if forward_weight < 1:
            loss = loss + (1 - forward_weight) * (divergences.reverse * weights).sum()
        metrics = divergence_metrics(divergences, scores, batch, weights)
        if self.is_on_policy:
            metrics |= engine_mismatch_metrics(scores.logprobs, batch[keys.GENERATION_LOGPROBS], mask, num_tokens)
        return loss, metrics

    def _divergences(self, scores: TokenScores, batch: TrainingBatch) -> Divergences:
        assert scores.candidates is not None
        absent = batch[keys.TEACHER_TOPK_IDS] < 0
        log_p = batch[keys.TEACHER_TOPK_LOGPROBS].masked_fill(absent, LOG_ZERO)
        log_q = scores.candidates.masked_fill(absent, LOG_ZERO)  # [B, T, K]
        log_p = log_p.log_softmax(-1).clamp(min=LOG_ZERO)
        if not self.config.zero_outside_topk:
            log_q = log_q.log_softmax(-1)
        p, q, difference = log_p.exp(), log_q.exp(), log_p - log_q
        forward, reverse = (p * difference).sum(-1), -(q * difference).sum(-1)
        if scores.entropy is not None:
            q_log_q_outside_topk = -scores.entropy - (q * log_q).sum(-1)
            reverse = reverse + q_log_q_outside_topk - LOG_ZERO * (1 - q.sum(-1))
        return Divergences(forward, reverse)


@torch.no_grad()
def divergence_metrics(
    divergences: Divergences, scores: TokenScores, batch: TrainingBatch, weights: torch.Tensor
) -> dict[str, Metric]:
    """Return means over the trained tokens: both divergences, whichever is trained on, and the K tokens' mass."""
    assert scores.candidates is not None
    absent = batch[keys.TEACHER_TOPK_IDS] < 0
    means = {
        "forward_kl": divergences.forward,
        "reverse_kl": divergences.reverse,
        "teacher_topk_mass": batch[keys.TEACHER_TOPK_LOGPROBS].exp().masked_fill(absent, 0.0).sum(-1),
        "student_topk_mass": scores.candidates.exp().masked_fill(absent, 0.0).sum(-1),
    }
    metrics = {name: Metric((value * weights).sum()) for name, value in means.items()}
    return metrics | {"num_valid_samples": Metric(batch[keys.SAMPLE_MASK].sum(), "count")}
