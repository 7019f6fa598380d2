"""The loss against a teacher with another tokenizer, in hand-computed numbers."""

from math import log
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.loss import CrossTokenizerConfig
from nemo_rl.loss_types import Normalizer, TokenScores, TopK
from nemo_rl.losses.distillation_section import DistillationLossConfig
from nemo_rl.losses.divergences import CrossTokenizerLoss, later_logprobs

TWO = Normalizer(num_valid_tokens=2.0, num_valid_trajectories=1.0)


def loss_of(kl_type: str = "forward", *, matching: str = "prefix", **options: Any) -> CrossTokenizerLoss:
    section = CrossTokenizerConfig(enabled=True, matching=matching)  # type: ignore[arg-type]
    return CrossTokenizerLoss(DistillationLossConfig(kl_type=kl_type, cross_tokenizer=section), **options)  # type: ignore[arg-type]


def batch_of(ids: list[list[int]], probs: list[list[float]], **others: torch.Tensor) -> TensorDict:
    """One row whose first token is the prompt's."""
    width = len(ids[0])
    logprobs = torch.tensor([[0.0] * width, *([log(p) if p else 0.0 for p in row] for row in probs)])
    return TensorDict(
        {
            "token_mask": torch.tensor([[0.0] + [1.0] * len(ids)]),
            "sample_mask": torch.ones(1),
            "generation_logprobs": torch.zeros(1, len(ids) + 1),
            "teacher_topk_ids": torch.tensor([[[-1] * width, *ids]]),
            "teacher_topk_logprobs": logprobs[None],
            **{name: value[None] for name, value in others.items()},
        },
        batch_size=[1],
    )


def candidates(probs: list[list[float]]) -> torch.Tensor:
    return torch.tensor([[[0.0] * len(probs[0]), *([log(p) if p else 0.0 for p in row] for row in probs)]])


def test_forward_reverse_and_mixed_by_hand():
    """q = (.5, .25), p = (.25, .5): forward .5 log 2 - .25 log 2 = .1733, the masses being equal; reverse the same."""
    batch = batch_of([[3, 4], [5, -1]], [[0.5, 0.25], [0.8, 0]])
    scores = TokenScores(torch.zeros(1, 3), candidates([[0.25, 0.5], [0.4, 0.0]]))
    second = {"forward": 0.8 * log(2) - 0.4, "reverse": 0.4 * log(0.5) + 0.4}
    for kl_type, value in second.items():
        loss, metrics = loss_of(kl_type)(scores, batch, TWO)
        assert float(loss) == pytest.approx((0.25 * log(2) + value) / 2)
        assert float(metrics["divergence"].value) == pytest.approx(float(loss))
    mixed, _ = loss_of("mixed")(scores, batch, TWO)
    assert float(mixed) == pytest.approx((0.25 * log(2) + sum(second.values()) / 2) / 2)


@pytest.mark.parametrize("matching", ["prefix", "identical"])
@pytest.mark.parametrize("kl_type", ["forward", "reverse", "mixed"])
def test_over_whole_vocabularies_it_is_the_kullback_leibler_divergence(kl_type, matching):
    torch.manual_seed(0)
    teacher = torch.randn(1, 4, 7).log_softmax(-1)
    logits = torch.randn(1, 4, 7, requires_grad=True)
    student = logits.log_softmax(-1)
    others = {"teacher_unmatched": torch.zeros(4, 7), "span_lengths": torch.tensor([0, 1, 1, 1])}
    ids = torch.arange(7).expand(4, 7)
    batch = batch_of(ids[1:].tolist(), teacher[0, 1:].exp().tolist(), **others)
    loss_fn = loss_of(kl_type, matching=matching, topk=7, student_unmatched=torch.zeros(7, dtype=torch.bool))
    scores = TokenScores(torch.zeros(1, 4), student, topk=TopK(ids[None], student))
    loss, _ = loss_fn(scores, batch, Normalizer(3.0, 1.0))
    q, p = teacher[:, 1:], student[:, 1:]
    forward, reverse = (q.exp() * (q - p)).sum(-1).mean(), (p.exp() * (p - q)).sum(-1).mean()
    exact = {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[kl_type]
    torch.testing.assert_close(loss, exact, atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, logits)[0], atol=1e-6, rtol=1e-5)


def test_it_is_least_where_the_student_agrees():
    batch = batch_of([[3, 4]], [[0.5, 0.25]])
    for kl_type in ("forward", "reverse", "mixed"):
        at = candidates([[0.5, 0.25]]).requires_grad_()
        loss, _ = loss_of(kl_type)(TokenScores(torch.zeros(1, 2), at), batch, TWO)
        assert loss.item() == pytest.approx(0, abs=1e-7)
        assert torch.autograd.grad(loss, at)[0].abs().max() < 1e-7


def test_tokens_without_a_mask_or_a_candidate_have_no_loss_and_no_gradient():
    batch = batch_of([[3, 4], [-1, -1]], [[0.5, 0.25], [0, 0]])
    batch["sample_mask"] = torch.zeros(1)
    at = candidates([[0.25, 0.5], [0.1, 0.1]]).requires_grad_()
    loss, _ = loss_of()(TokenScores(torch.zeros(1, 3), at), batch, TWO)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, at)[0].any()


def test_the_later_tokens_of_a_span_multiply_its_first():
    logprobs = torch.tensor([[0.0, -1.0, -2.0, -4.0, -8.0]])
    assert later_logprobs(logprobs, torch.tensor([[0, 3, 0, 0, 1]])).tolist() == [[0, -6, 0, 0, 0]]


def test_gold_adds_the_distance_of_sorted_unmatched_probabilities():
    """A span's second token has .5. Matched: q .3, p .4 * .5. Unmatched: teacher (.2, .1), student .6 * .5."""
    others = {
        "teacher_unmatched": torch.tensor([[0.0, 0.0], [0.2, 0.1], [0.0, 0.0]]),
        "span_lengths": torch.tensor([0, 2, 0]),
    }
    batch = batch_of([[3], [-1]], [[0.3], [0.0]], **others)
    topk = TopK(torch.tensor([[[0, 1], [1, 3], [1, 3]]]), candidates([[0.6, 0.4], [0.6, 0.4]]))
    scores = TokenScores(torch.tensor([[0.0, log(0.4), log(0.5)]]), candidates([[0.4], [0.0]]), topk=topk)
    loss_fn = loss_of(matching="identical", topk=2, student_unmatched=torch.tensor([False, True, False, False]))
    loss, metrics = loss_fn(scores, batch, TWO)
    divergence, unmatched = 0.3 * log(1.5) - 0.3 + 0.2, abs(0.3 - 0.2) + abs(0.0 - 0.1)
    assert float(metrics["divergence"].value) == pytest.approx(divergence / 2)
    assert float(metrics["unmatched"].value) == pytest.approx(unmatched / 2)
    assert float(loss) == pytest.approx((divergence + unmatched) / 2)
    assert loss_fn.required_scores == (("teacher_topk_ids", False, 2))
