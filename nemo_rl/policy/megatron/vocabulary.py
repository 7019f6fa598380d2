"""What is asked of next-token distributions, from logits whose vocabulary is split over tensor parallel ranks.

N positions, v entries of the vocabulary on this rank, V in all, K candidates or most likely tokens. A rank adds what
its own entries give, so only numbers a position are exchanged, never logits; every rank gets the same answers.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region

from nemo_rl.interfaces import TokenScores, TopK
from nemo_rl.policy import token_scores
from nemo_rl.policy.megatron import parallel
from nemo_rl.policy.token_scores import Questions


def answered(logits: torch.Tensor, questions: Questions, *, num_tokens: int) -> TokenScores:
    """From this rank's [N, v] float32 logits; `num_tokens` is V, behind which the last rank has entries of no token."""
    if dist.get_world_size(parallel.tensor_group()) == 1:
        return token_scores.answered(logits, questions)
    first = parallel.tensor_rank() * logits.shape[1]
    logits = logits[:, : num_tokens - first]
    logprobs = logits - _log_normalizer(logits)[:, None]  # [N, v]: of the whole vocabulary's log_softmax
    candidates = entropy = topk = None
    if questions.candidate_ids is not None:
        candidates = _picked(logprobs, questions.candidate_ids, first)
    if questions.entropy:
        entropy = _over_ranks(-(logprobs.exp() * logprobs).sum(-1))
    if questions.topk:
        topk = _most_likely(logprobs, questions.topk, first)
    return TokenScores(_picked(logprobs, questions.targets[:, None], first).squeeze(1), candidates, entropy, topk)


def _log_normalizer(logits: torch.Tensor) -> torch.Tensor:
    """[N] log of the sum of exp(logits) over the whole vocabulary; each rank's use of it gives it a gradient."""
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=parallel.tensor_group())
    normalizer = _over_ranks((logits - highest[:, None]).exp().sum(-1)).log() + highest
    return copy_to_tensor_model_parallel_region(normalizer)


def _picked(logprobs: torch.Tensor, ids: torch.Tensor, first: int) -> torch.Tensor:
    """[N, K] log-probs of these ids, which one rank each has; 0 for ids below 0."""
    local = ids - first
    is_here = (local >= 0) & (local < logprobs.shape[1]) & (ids >= 0)
    values = logprobs.gather(1, local.clamp(0, logprobs.shape[1] - 1)).masked_fill(~is_here, 0.0)
    return _over_ranks(values)


def _most_likely(logprobs: torch.Tensor, k: int, first: int) -> TopK:
    """The k most likely of all ranks' k most likely."""
    own, ids = logprobs.detach().topk(min(k, logprobs.shape[1]), dim=-1)
    missing = k - own.shape[1]
    own, ids = F.pad(own, (0, missing), value=-torch.inf), F.pad(ids + first, (0, missing))
    places = torch.cat(_gathered(own), dim=1).topk(k, dim=-1).indices
    chosen = torch.cat(_gathered(ids), dim=1).gather(1, places)
    return TopK(chosen, _picked(logprobs, chosen, first))


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(parallel.tensor_group()))]
    dist.all_gather(parts, tensor.contiguous(), group=parallel.tensor_group())
    return parts


def _over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum over ranks; the gradient of a rank's part is that of the sum."""
    return reduce_from_tensor_model_parallel_region(values)
