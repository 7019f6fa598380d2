import math

import pytest
import torch

from nemo_rl.policy import logprobs as vocabulary_scores
from nemo_rl.policy.logprobs import logprobs_and_entropy


@pytest.fixture(params=[1, 40, 2**22], ids=["row by row", "in blocks", "at once"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_scores, "BLOCK", request.param)


def test_values_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [5.0, 5.0]])
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([[0, 1], [1, 1]]), entropy=True)
    expected = [[math.log(0.25), math.log(0.75)], [math.log(0.5)] * 2]
    torch.testing.assert_close(logprobs, torch.tensor(expected))
    of_the_first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(entropy, torch.tensor([of_the_first, math.log(2.0)]))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_are_those_of_log_softmax(entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(7, 13, generator=generator, dtype=torch.float64) * 3
    ids = torch.randint(13, (7, 4), generator=generator)
    ids[2] = 5  # the same token twice
    grad_logprobs = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    grad_entropy = torch.randn(7, generator=generator, dtype=torch.float64)
    results = []
    for own in (True, False):
        leaf = weights.clone().requires_grad_()
        logits = leaf * 1.5
        if own:
            logprobs, entropies = logprobs_and_entropy(logits, ids, entropy=entropy)
        else:
            everything = logits.log_softmax(-1)
            logprobs, entropies = everything.gather(1, ids), -(everything.exp() * everything).sum(-1) * entropy
        ((logprobs * grad_logprobs).sum() + (entropies * grad_entropy).sum()).backward()
        results.append((logprobs, entropies, leaf.grad))
    torch.testing.assert_close(results[0], results[1])


def test_second_backward_pass_is_refused() -> None:
    """The first has written over the logits."""
    logits = torch.randn(2, 3, requires_grad=True) * 2
    logprobs, _ = logprobs_and_entropy(logits, torch.zeros(2, 1, dtype=torch.int64))
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
