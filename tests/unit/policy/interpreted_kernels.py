"""Errors of the Triton kernels in Triton's interpreter, as JSON: run with TRITON_INTERPRET=1, which it reads at import.

Blocks are shorter than the vocabularies, so that rows take several, the last one partly masked.
"""

import json
from collections.abc import Callable
from typing import TypeVar

import torch

from nemo_rl.loss_types import RequiredScores, TokenScores
from nemo_rl.policy import log_softmax, log_softmax_kernels, logprobs
from nemo_rl.policy.logprobs import CausalLogprobs
from tests.unit.policy.tiny import MODELS, make_batch

BLOCK = 16
ResultT = TypeVar("ResultT")
CANDIDATES = [3, -1, 7]
LENGTHS = [6, 11]


def scores_and_gradients(name: str, chunk_size: int | None, *, uses_kernels: bool) -> list[torch.Tensor]:
    """Return all scores of a tiny model and the gradients of its weights; without kernels by the chunked path."""
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = make_batch(LENGTHS)
    module = CausalLogprobs(model, temperature=0.7, chunk_size=chunk_size)
    if not uses_kernels:
        module._score_in_chunks = lambda hidden, query: logprobs.score_in_chunks(  # type: ignore[method-assign]
            module._score_hidden, hidden, query, size=chunk_size
        )
    candidates = torch.tensor(CANDIDATES).expand(*batch["token_ids"].shape, len(CANDIDATES))
    scores: TokenScores = with_kernels(
        uses_kernels,
        lambda: module(
            batch["token_ids"], batch["token_mask"] > 0, RequiredScores(candidates="c", entropy=True), candidates
        ),
    )
    assert scores.candidates is not None
    assert scores.entropy is not None
    loss = (scores.logprobs * batch["advantages"]).sum() + (scores.candidates**2).sum() + scores.entropy.sum()
    with_kernels(uses_kernels, loss.backward)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [scores.logprobs.detach(), scores.candidates.detach(), scores.entropy.detach(), *gradients]


def with_kernels(are_used: bool, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of a call that uses the kernels for float32 logits, or never."""
    usual = log_softmax._uses_kernels
    log_softmax._uses_kernels = lambda logits: are_used and logits.dtype == torch.float32
    try:
        return call()
    finally:
        log_softmax._uses_kernels = usual


def errors() -> dict[str, float]:
    found = {"kernels": log_softmax.kernel_error(torch.device("cpu"))}
    for name in ("qwen2", "llama", "cohere", "gemma2"):
        for chunk_size in (None, 5):
            own, expected = (scores_and_gradients(name, chunk_size, uses_kernels=uses) for uses in (True, False))
            relative = [
                float((one - other).abs().max() / other.abs().max().clamp(min=1.0))
                for one, other in zip(own, expected, strict=True)
            ]
            found[f"{name}, chunks of {chunk_size}"] = max(relative)
    return found


def main() -> None:
    calls: list[torch.Size] = []
    statistics = log_softmax_kernels.row_statistics

    def counted(logits: torch.Tensor, *args: object) -> object:
        calls.append(logits.shape)
        return statistics(logits, *args)

    log_softmax_kernels.BLOCK = BLOCK
    log_softmax_kernels.row_statistics = counted  # type: ignore[assignment]
    print(json.dumps({**errors(), "calls": len(calls)}))  # noqa: T201


if __name__ == "__main__":
    main()
