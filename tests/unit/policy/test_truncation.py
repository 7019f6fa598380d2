"""Top-k and top-p truncation: by hand, as vLLM truncates, as the hf engine does, and over a split vocabulary."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from nemo_rl.generation.hf import filter_logits
from nemo_rl.loss_types import Normalizer, TokenScores
from nemo_rl.policy.logprobs import ScoreQuery, score_logits, score_truncated
from nemo_rl.policy.truncation import WHOLE, Truncation, kept_tokens, sampling_mask_metrics
from nemo_rl.types import SamplingParams
from tests.unit.policy.tiny import over_shards

PROBABILITIES = torch.tensor([[0.3, 0.5, 0.2]])
EACH = [(0.6, None), (0.95, None), (1.0, 3), (0.7, 4), (0.999, 40), (0.01, None)]


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (0.5, None, [False, True, False]),
        (0.51, None, [True, True, False]),
        (0.9, None, [True, True, True]),
        (1.0, 1, [False, True, False]),
        (1.0, 9, [True, True, True]),
        (0.6, 2, [False, True, False]),  # .5 of the remaining .8 is .625
    ],
)
def test_kept_tokens_by_hand(top_p: float, top_k: int | None, kept: list[bool]) -> None:
    assert kept_tokens(PROBABILITIES.log(), top_p=top_p, top_k=top_k).tolist() == [kept]


@pytest.mark.parametrize(("top_p", "top_k"), EACH)
def test_kept_tokens_are_those_of_both_engines(top_p: float, top_k: int | None) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 2
    kept = kept_tokens(logits, top_p=top_p, top_k=top_k)
    k = None if top_k is None else torch.full((50,), top_k)
    assert torch.equal(kept, apply_top_k_top_p_pytorch(logits.clone(), k, torch.full((50,), top_p)).isfinite())
    sampling = SamplingParams(1, top_p=top_p, top_k=top_k or -1)
    assert torch.equal(kept, torch.stack([filter_logits(row, sampling) for row in logits]).isfinite())


def test_logprobs_and_entropy_of_the_truncated_distribution_by_hand() -> None:
    truncation, targets = Truncation(top_p=0.6), torch.tensor([1])
    scores = score_logits(truncation(PROBABILITIES.log(), targets), ScoreQuery(targets, entropy=True))
    assert scores.logprobs.exp().item() == pytest.approx(0.5 / 0.8)
    assert scores.entropy is not None
    assert scores.entropy.item() == pytest.approx(0.6615632)  # of .625 and .375, in nats


def test_target_outside_is_kept_with_a_gradient() -> None:
    logits = PROBABILITIES.log().requires_grad_()
    targets = torch.tensor([2])
    scores = score_logits(Truncation(top_k=1)(logits * 1.0, targets), ScoreQuery(targets))
    assert scores.logprobs.exp().item() == pytest.approx(0.2 / 0.7)
    scores.logprobs.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, -0.5 / 0.7, 0.5 / 0.7]]))


TIED = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).repeat(4, 1).log()  # top-2 leaves all four: three are second


def test_log_probs_are_of_the_set_that_the_engine_drew_from() -> None:
    """The engine broke the tie for the first row, has the policy's set for the second, and gave none for the third;
    the last set lacks the target, which is kept."""
    recorded = torch.tensor([[2, 0, -1, -1], [3, 1, 0, 2], [-1, -1, -1, -1], [0, 1, -1, -1]], dtype=torch.int32)
    logits, targets = TIED.clone().requires_grad_(), torch.tensor([2, 2, 2, 2])
    query = ScoreQuery(targets, sampling_mask=recorded, entropy=True)
    scores = score_truncated(logits * 1.0, query, Truncation(top_k=2))
    torch.testing.assert_close(scores.logprobs.exp(), torch.tensor([0.2 / 0.6, 0.2, 0.2, 0.2 / 0.8]))
    assert scores.sampling_mask_differs is not None
    assert scores.sampling_mask_differs.tolist() == [1, 0, 0, 1]
    assert scores.entropy is not None
    assert scores.entropy[0].item() == pytest.approx(0.6365142)  # of 2/3 and 1/3, in nats
    scores.logprobs.sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], torch.tensor([-2 / 3, 0.0, 2 / 3, 0.0]))


def test_shares_of_sets_count_trained_tokens() -> None:
    """Of four trained tokens one has another set and one has none; the fifth is not trained on."""
    sets = torch.tensor([[[-1], [0], [0], [-1]], [[-1], [0], [0], [-1]]], dtype=torch.int32)
    batch = TensorDict(
        {
            "token_mask": torch.tensor([[0.0, 1, 1, 1], [0, 1, 0, 0]]),
            "sample_mask": torch.ones(2),
            "columns": TensorDict({"sampling_mask": sets}, batch_size=[2]),
        },
        batch_size=[2],
    )
    differs = torch.tensor([[0.0, 0, 1, 0], [0, 0, 1, 0]])
    scores = TokenScores(torch.zeros(2, 4), sampling_mask_differs=differs)
    metrics = sampling_mask_metrics(scores, batch, Normalizer(4.0, 2.0))
    found = {name: metric.value.item() for name, metric in metrics.items()}
    assert found == {"sampling_mask_mismatch": 0.25, "sampling_mask_missing": 0.25}
    without = sampling_mask_metrics(scores, batch.exclude("columns"), Normalizer(4.0, 2.0))
    assert without["sampling_mask_missing"].value.item() == 1.0
    assert sampling_mask_metrics(TokenScores(torch.zeros(2, 4)), batch, Normalizer(4.0, 2.0)) == {}


def test_whole_distribution_is_left_as_it_is() -> None:
    logits = PROBABILITIES.log()
    assert WHOLE(logits, torch.tensor([0])) is logits


# the fourth set lacks its target, the fifth is missing
RECORDED = torch.tensor([[0, 12, 5], [4, 3, -1], [5, -1, -1], [1, 2, 3], [-1, -1, -1], [9, 10, 8]])


def scores_and_gradient(truncation: Truncation, logits: torch.Tensor, shard: Any = None) -> list[torch.Tensor]:
    leaf, targets = logits.clone().requires_grad_(), torch.tensor([0, 4, 5, 12, 4, 9])
    query = ScoreQuery(targets, entropy=True, sampling_mask=RECORDED)
    scores = score_truncated(leaf * 1.0, query, truncation, shard)
    assert scores.entropy is not None
    (scores.logprobs.sum() + (scores.entropy * torch.arange(6)).sum()).backward()
    assert leaf.grad is not None
    return [scores.logprobs, scores.entropy, leaf.grad]


@pytest.mark.parametrize(("top_p", "top_k"), EACH)
def test_split_vocabulary_gives_the_scores_and_gradients_of_the_whole(top_p: float, top_k: int | None) -> None:
    logits = torch.randn(6, 13, generator=torch.Generator().manual_seed(0)) * 3
    truncation = Truncation(top_p, top_k)
    logprobs, entropy, gradient = scores_and_gradient(truncation, logits)
    results = over_shards(lambda part, shard: scores_and_gradient(truncation, part, shard), logits, (3, 6, 4))
    for own_logprobs, own_entropy, _ in results:
        torch.testing.assert_close([own_logprobs, own_entropy], [logprobs, entropy], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat([g for *_, g in results], dim=1), gradient, rtol=1e-6, atol=1e-6)
