"""The loss against a teacher with another tokenizer, whose targets algorithms/cross_tokenizer_targets.py computes.

B samples, T tokens, W candidates, K most likely tokens.
"""

import torch
import torch.nn.functional as F

from nemo_rl import batch as keys
from nemo_rl.interfaces import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.losses.distillation import DistillationLossConfig
from nemo_rl.losses.policy_gradient import engine_mismatch_metrics
from nemo_rl.policy.micro_batches import loss_mask
from nemo_rl.types import TrainingBatch


class CrossTokenizerLoss:
    """Mean over the step's valid tokens of D(teacher, student) over candidates, plus what has no counterpart.

    With q and p the teacher's and the student's probabilities of a token's candidates, which need not sum to 1:

        forward = sum q log(q / p) - q + p      reverse = sum p log(p / q) - p + q

    the generalised Kullback-Leibler divergence (Csiszár 1991), 0 only where p = q, and the common one where both sum
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
        """Set `is_on_policy` where responses have log-probs of the engine to compare the student's with.

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
        """Return the masks and the teacher's candidates; spans where these are compared as a whole."""
        read = {keys.TOKEN_MASK, keys.SAMPLE_MASK} | ({keys.GENERATION_LOGPROBS} if self._is_on_policy else set())
        span_keys = {keys.TEACHER_UNMATCHED, keys.SPAN_LENGTHS} if self._compares_spans else set()
        return frozenset(read | span_keys | {keys.TEACHER_TOPK_IDS, keys.TEACHER_TOPK_LOGPROBS})

    @property
    def required_scores(self) -> RequiredScores:
        """Return the teacher's candidates, and the student's own tokens where unmatched ones are compared."""
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
