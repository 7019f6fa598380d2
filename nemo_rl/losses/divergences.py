"""Divergences of the student from its teachers, with one tokenizer or two. Formulas, sources: docs/distillation.md.

With the student's tokenizer a teacher gives its most likely tokens; for another tokenizer
algorithms/cross_tokenizer_targets.py computes the targets. B samples, T tokens, K of the teacher's most likely
tokens, W candidates.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nemo_rl import batch as keys
from nemo_rl.interfaces import LossFn
from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.losses.distillation_section import DistillationLossConfig
from nemo_rl.losses.make import LossContext
from nemo_rl.losses.policy_gradient import engine_mismatch_metrics
from nemo_rl.policy.micro_batches import loss_mask
from nemo_rl.types import TrainingBatch

LOG_ZERO = -100.0  # log p of tokens that the teacher rules out, so that reverse stays finite


@dataclass(frozen=True, slots=True)
class Divergences:
    """Both divergences of each token: [B, T]."""

    forward: torch.Tensor
    reverse: torch.Tensor


class TopKDivergence:
    """Sum over tokens of a divergence over the teacher's K tokens, each token over the step's count of them.

    With p the teacher's and q the student's probabilities of a token's K candidates:
    forward = sum p (log p - log q), reverse = sum q (log q - log p), mixed = w forward + (1 - w) reverse.

    `zero_outside_topk: false`: p and q are renormalised over the K tokens. `true`: p is, and is e^-100 for all others;
    q is of the whole vocabulary, so reverse also has the sum over the others of q (log q + 100).
    """

    def __init__(self, config: DistillationLossConfig, *, is_on_policy: bool = True) -> None:
        """Set `is_on_policy` if responses are the student's samples, with the engine's log-probs to compare."""
        self.config = config
        self.is_on_policy = is_on_policy

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the masks and the teacher's tokens; on-policy also the engine's log-probs."""
        read = {keys.TOKEN_MASK, keys.SAMPLE_MASK, keys.TEACHER_TOPK_IDS, keys.TEACHER_TOPK_LOGPROBS}
        return frozenset(read | ({keys.GENERATION_LOGPROBS} if self.is_on_policy else set()))

    @property
    def required_scores(self) -> RequiredScores:
        """Return the teacher's tokens as candidates; the entropy if tokens outside them count."""
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


class CrossTokenizerLoss:
    """Mean over the step's valid tokens of D(teacher, student) over candidates, plus a term for unmatched tokens.

    With q and p the teacher's and the student's probabilities of a token's candidates, which need not sum to 1:

        forward = sum q log(q / p) - q + p      reverse = sum p log(p / q) - p + q

    the generalised Kullback-Leibler divergence (Csiszár 1991), 0 only if p = q, and the common one if both sum
    to 1. With `matching: identical` (GOLD) p is that of a span's first token times those of the span's later tokens,
    and `unmatched_weight` times the L1 distance of the sorted probabilities of unmatched tokens is added (ULD, arXiv
    2402.12030). A token without candidates adds nothing.
    """

    def __init__(
        self,
        config: DistillationLossConfig,
        *,
        topk: int = 0,
        student_unmatched: torch.Tensor | None = None,
        is_on_policy: bool = True,
    ) -> None:
        """Set `is_on_policy` if responses have log-probs of the engine to compare the student's with.

        `matching: identical` needs the teacher's `topk`, and `student_unmatched`, [V] bool: the student's tokens
        without a counterpart.
        """
        self._config = config
        self._compares_spans = config.cross_tokenizer.matching == "identical"
        self._topk = topk if self._compares_spans and config.cross_tokenizer.unmatched_weight > 0 else 0
        self._student_unmatched = student_unmatched
        self._is_on_policy = is_on_policy

    @property
    def required_keys(self) -> frozenset[str]:
        """Return the masks and the teacher's candidates; spans if these are compared as a whole."""
        read = {keys.TOKEN_MASK, keys.SAMPLE_MASK} | ({keys.GENERATION_LOGPROBS} if self._is_on_policy else set())
        span_keys = {keys.TEACHER_UNMATCHED, keys.SPAN_LENGTHS} if self._compares_spans else set()
        return frozenset(read | span_keys | {keys.TEACHER_TOPK_IDS, keys.TEACHER_TOPK_LOGPROBS})

    @property
    def required_scores(self) -> RequiredScores:
        """Return the teacher's candidates, and the student's own tokens if unmatched ones are compared."""
        return RequiredScores(candidates=keys.TEACHER_TOPK_IDS, topk=self._topk)

    def __call__(
        self, scores: TokenScores, batch: TrainingBatch, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        mask = loss_mask(batch)
        assert scores.candidates is not None
        later = later_logprobs(scores.logprobs, batch[keys.SPAN_LENGTHS]) if self._compares_spans else None
        is_candidate = (batch[keys.TEACHER_TOPK_IDS] >= 0) & (mask > 0)[..., None]
        student = scores.candidates if later is None else scores.candidates + later[..., None]
        terms = self._divergence(batch[keys.TEACHER_TOPK_LOGPROBS], student, is_candidate)
        count = max(normalizer.num_valid_tokens, 1.0)
        divergence = (terms * mask).sum() / count
        metrics = {
            "divergence": Metric(divergence.detach()),
            "num_valid_samples": Metric(batch[keys.SAMPLE_MASK].sum(), "count"),
        }
        if self._is_on_policy:
            metrics |= engine_mismatch_metrics(scores.logprobs, batch[keys.GENERATION_LOGPROBS], mask, count)
        if not self._topk or later is None:
            return divergence, metrics
        unmatched = (self._unmatched(scores, batch, later) * mask).sum() / count
        metrics["unmatched"] = Metric(unmatched.detach())
        return divergence + self._config.cross_tokenizer.unmatched_weight * unmatched, metrics

    def _divergence(self, teacher: torch.Tensor, student: torch.Tensor, is_candidate: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token, [B, T], from log-probs [B, T, W]."""
        teacher, student = teacher.masked_fill(~is_candidate, 0.0), student.masked_fill(~is_candidate, 0.0)
        q, p = teacher.exp(), student.exp()
        forward, reverse = q * (teacher - student) - q + p, p * (student - teacher) - p + q
        weight = self._config.forward_weight
        return ((weight * forward + (1 - weight) * reverse) * is_candidate).sum(-1)

    def _unmatched(self, scores: TokenScores, batch: TrainingBatch, later: torch.Tensor) -> torch.Tensor:
        """Return the L1 distance between both sides' unmatched probabilities, each sorted: [B, T], 0 but at spans."""
        assert scores.topk is not None
        assert self._student_unmatched is not None
        padded = F.pad(self._student_unmatched, (0, 1))  # the last entry stands for ids beyond the vocabulary
        lacks_counterpart = padded.to(scores.topk.ids.device)
        is_unmatched = lacks_counterpart[scores.topk.ids.clamp(max=len(lacks_counterpart) - 1)]
        student = (scores.topk.logprobs + later[..., None]).exp() * is_unmatched
        teacher = batch[keys.TEACHER_UNMATCHED]
        width = max(student.shape[-1], teacher.shape[-1])
        student = F.pad(student.sort(dim=-1, descending=True).values, (0, width - student.shape[-1]))
        distance = (student - F.pad(teacher, (0, width - teacher.shape[-1]))).abs().sum(-1)
        return distance * (batch[keys.SPAN_LENGTHS] > 0)


def later_logprobs(logprobs: torch.Tensor, span_lengths: torch.Tensor) -> torch.Tensor:
    """Return, at a span's first token, the sum of its later tokens' log-probs, elsewhere 0: [B, T]."""
    sums = logprobs.double().cumsum(-1)  # float64, so that differences keep float32's digits
    at = torch.arange(logprobs.shape[-1], device=logprobs.device)
    last = (at + span_lengths - 1).clamp(min=0, max=logprobs.shape[-1] - 1)
    return torch.where(span_lengths > 0, sums.gather(-1, last) - sums, 0.0).float()


def make_distillation_loss(section: DistillationLossConfig, context: LossContext) -> LossFn:
    """Return the loss against teachers with the student's tokenizer, or with their own if that is enabled."""
    if section.token_matching is not None:
        return CrossTokenizerLoss(section, topk=context.topk, student_unmatched=context.student_unmatched)
    return TopKDivergence(section, is_on_policy=context.is_on_policy)
