"""Log-probs from hidden states in one function, against log_softmax and against the chunks of every other head."""

from typing import Any

import pytest
import torch
from torch import nn

from nemo_rl.policy import logprobs
from nemo_rl.policy.linear_logprobs import LinearOptions, is_plain_matrix, linear_logprobs
from nemo_rl.policy.logprobs import CausalLogprobs
from tests.unit.policy.test_logprobs import LargestTensor
from tests.unit.policy.tiny import MODELS, make_batch

WIDTH, VOCABULARY = 8, 37


def tensors(dtype: torch.dtype, *, number: int = 13) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(number, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(VOCABULARY, (number, 3), generator=generator)
    ids[::2, 1] = ids[::2, 0]  # the same token twice
    of_logprobs = torch.randn(number, 3, generator=generator)
    return hidden, weight, ids, of_logprobs, torch.randn(number, generator=generator)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 5, 13, 64])
def test_values_and_gradients_are_those_of_log_softmax(chunk_size: int | None, entropy: bool) -> None:
    hidden, weight, ids, of_logprobs, of_entropy = tensors(torch.float64)
    logprobs, entropies = linear_logprobs(hidden, weight, ids, LinearOptions(0.7, entropy, chunk_size))
    everything = (0.7 * hidden @ weight.T).log_softmax(-1)
    expected = everything.gather(1, ids), -(everything.exp() * everything).sum(-1) * entropy
    torch.testing.assert_close((logprobs, entropies), expected)
    losses = [(lp * of_logprobs).sum() + (h * of_entropy).sum() for lp, h in ((logprobs, entropies), expected)]
    gradients = [torch.autograd.grad(loss, [hidden, weight]) for loss in losses]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_bfloat16_has_float32_logits_and_gradients_rounded_once(chunk_size: int | None) -> None:
    hidden, weight, ids, of_logprobs, _ = tensors(torch.bfloat16)
    logprobs, _ = linear_logprobs(hidden, weight, ids, LinearOptions(1.0, False, chunk_size))
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    expected = (wide[0] @ wide[1].T).log_softmax(-1).gather(1, ids)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    own = torch.autograd.grad((logprobs * of_logprobs).sum(), [hidden, weight])
    exact = torch.autograd.grad((expected * of_logprobs).sum(), wide)
    for one, other in zip(own, exact, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_gradients_that_nobody_needs_are_not_computed(frozen: str) -> None:
    hidden, weight, ids, *_ = tensors(torch.float32)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    logprobs, _ = linear_logprobs(hidden, weight, ids, LinearOptions(1.0, False, 5))
    logprobs.sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_no_positions_have_zero_gradients() -> None:
    hidden, weight, ids, *_ = tensors(torch.float32, number=0)
    logprobs, entropies = linear_logprobs(hidden, weight, ids, LinearOptions(1.0, True, 5))
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.shape == (0, 3)
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_second_backward_pass_over_kept_logits_is_refused(chunk_size: int | None) -> None:
    hidden, weight, ids, *_ = tensors(torch.float32)
    logprobs, _ = linear_logprobs(hidden, weight, ids, LinearOptions(1.0, False, chunk_size))
    logprobs.sum().backward(retain_graph=True)
    if chunk_size is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logprobs.sum().backward()
    else:
        logprobs.sum().backward()  # logits that are computed again


def test_logits_of_more_than_a_chunk_never_exist() -> None:
    hidden, weight, ids, *_ = tensors(torch.float32)
    with LargestTensor() as seen:
        linear_logprobs(hidden, weight, ids, LinearOptions(1.0, True, 10))[0].sum().backward()
    assert seen.numel == 10 * VOCABULARY


@pytest.mark.parametrize(
    ("layer", "is_plain"),
    [
        (nn.Linear(WIDTH, VOCABULARY, bias=False), True),
        (nn.Linear(WIDTH, VOCABULARY), False),
        (nn.Linear(WIDTH, VOCABULARY, bias=False).bfloat16(), False),
        (nn.Sequential(nn.Linear(WIDTH, VOCABULARY, bias=False)), False),
    ],
)
def test_plain_output_layers(layer: nn.Module, is_plain: bool) -> None:
    hidden = torch.zeros(2, WIDTH)
    assert is_plain_matrix(layer, hidden) == is_plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_plain_matrix(layer, hidden)


@pytest.mark.parametrize(("name", "is_linear"), [("qwen2", True), ("cohere", True), ("gemma2", False)])
def test_models_without_soft_capping_are_scored_so(name: str, is_linear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def score_in_chunks(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return in_chunks(*args, **options)

    in_chunks = logprobs.score_in_chunks
    monkeypatch.setattr(logprobs, "score_in_chunks", score_in_chunks)
    batch = make_batch([6, 11])
    CausalLogprobs(MODELS[name](), temperature=0.5, chunk_size=4)(batch["token_ids"], batch["token_mask"] > 0)
    assert (not calls) == is_linear
