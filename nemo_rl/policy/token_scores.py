"""What is asked of next-token distributions, and the answers; policy/logprobs.py makes the logits, a chunk at a time.

N positions that someone needs, V vocabulary, K candidates or most likely tokens; B samples, T tokens.
"""

from dataclasses import dataclass

import torch

from nemo_rl.interfaces import RequiredScores, TokenScores, TopK
from nemo_rl.policy.vocabulary_scores import logprobs_and_entropy

LOGPROBS_ALONE = RequiredScores()


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked of N distributions."""

    targets: torch.Tensor  # [N] int64: tokens whose log-probs are wanted
    candidate_ids: torch.Tensor | None = None  # [N, K] int64; those below 0 are none
    entropy: bool = False
    topk: int = 0

    def split(self, size: int) -> list["Questions"]:
        """The same of `size` distributions at a time."""
        targets = self.targets.split(size)
        candidates = [None] * len(targets) if self.candidate_ids is None else self.candidate_ids.split(size)
        return [Questions(t, c, entropy=self.entropy, topk=self.topk) for t, c in zip(targets, candidates, strict=True)]


def answered(logits: torch.Tensor, questions: Questions) -> TokenScores:
    """From [N, V] float32 logits, already divided by the temperature; entries are [N] and [N, K].

    The logits are spent: their gradient is written over them.
    """
    given, topk = questions.candidate_ids, None
    ids = [questions.targets.unsqueeze(1)]
    if given is not None:
        ids.append(given.clamp(min=0))
    if questions.topk:
        ids.append(logits.detach().topk(questions.topk, dim=-1).indices)
    logprobs, entropy = logprobs_and_entropy(logits, torch.cat(ids, dim=1), entropy=questions.entropy)
    parts = list(logprobs.split([part.shape[1] for part in ids], dim=1))
    if questions.topk:
        topk = TopK(ids[-1], parts[-1])
    candidates = None if given is None else parts[1].masked_fill(given < 0, 0.0)
    return TokenScores(parts[0].squeeze(1), candidates, entropy if questions.entropy else None, topk)


def concatenated(parts: list[TokenScores]) -> TokenScores:
    """The answers of chunk after chunk as one."""
    first = parts[0]
    topk = None
    if first.topk is not None:
        of_parts = [part.topk for part in parts if part.topk is not None]
        topk = TopK(torch.cat([t.ids for t in of_parts]), torch.cat([t.logprobs for t in of_parts]))
    return TokenScores(
        torch.cat([part.logprobs for part in parts]),
        None if first.candidates is None else torch.cat([p.candidates for p in parts if p.candidates is not None]),
        None if first.entropy is None else torch.cat([p.entropy for p in parts if p.entropy is not None]),
        topk,
    )


def scattered(answers: TokenScores, needed: torch.Tensor) -> TokenScores:
    """[N] and [N, K] answers at their places in [B, T] and [B, T, K], 0 elsewhere; N places of `needed` are true."""
    topk = answers.topk
    return TokenScores(
        _placed(answers.logprobs, needed),
        None if answers.candidates is None else _placed(answers.candidates, needed),
        None if answers.entropy is None else _placed(answers.entropy, needed),
        None if topk is None else TopK(_placed(topk.ids, needed), _placed(topk.logprobs, needed)),
    )


def _placed(values: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    width = values.shape[1:]
    zeros = torch.zeros((*needed.shape, *width), dtype=values.dtype, device=values.device)
    mask = needed if not width else needed.unsqueeze(-1).expand(*needed.shape, *width)
    return zeros.masked_scatter(mask, values)  # no view, which FSDP2 would warn of
