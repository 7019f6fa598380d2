"""The preference loss against numbers computed by hand, however its pairs are ordered and split."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.config.supervised_runs import DPOConfig
from nemo_rl.data.supervised_samples import PairSample, SupervisedSample, make_pair_batch
from nemo_rl.loss_types import Normalizer, TokenScores
from nemo_rl.losses.preference import PreferenceLoss
from nemo_rl.types import TrainingBatch

# Two pairs of [prompt, prompt, answer...]: answers of 2 and 1, and of 1 and 2 tokens.
LOGPROBS = [[0, 0, -1.0, -2.0], [0, 0, -3.0, 0], [0, 0, -0.5, 0], [0, 0, -1.0, -1.5]]
REFERENCE = [[0, 0, -2.0, -3.0], [0, 0, -2.0, 0], [0, 0, -1.0, 0], [0, 0, -1.5, -2.0]]
# Rewards by hand: 2 and -1 (margin 3); 0.5 and 1 (margin -0.5). Means over tokens: 1 and -1; 0.5 and 0.5 (margin 0).
NLL = (3.0, 0.5)  # of the chosen answers


def softplus(margin: float) -> float:
    return math.log1p(math.exp(-margin))


def batch() -> TrainingBatch:
    def side(length: int) -> SupervisedSample:
        return SupervisedSample(np.arange(length, dtype=np.int32), np.arange(length) >= 2)

    pairs = make_pair_batch([PairSample(side(4), side(3)), PairSample(side(3), side(4))])
    pairs[keys.REFERENCE_LOGPROBS] = torch.tensor(REFERENCE)
    return pairs


def measured(rows: torch.Tensor | None = None, **section: Any) -> tuple[float, dict[str, float]]:
    rows = torch.arange(4) if rows is None else rows
    loss, metrics = PreferenceLoss(DPOConfig.model_validate(section))(
        TokenScores(torch.tensor(LOGPROBS)[rows]), batch()[rows], Normalizer(6.0, 4.0)
    )
    return loss.item(), {name: float(metric.value) for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"label_smoothing": 0.1},
            0.9 * (softplus(1.5) + softplus(-0.25)) / 2 + 0.1 * (softplus(-1.5) + softplus(0.25)) / 2,
        ),
        ({"loss_type": "hinge"}, (0.0 + 1.25) / 2),  # 1 - 1.5 < 0, 1 + .25
        ({"loss_type": "ipo"}, ((3 - 1) ** 2 + (-0.5 - 1) ** 2) / 2),
        ({"loss_type": "ipo", "preference_average_log_probs": True}, ((2 - 1) ** 2 + (0 - 1) ** 2) / 2),
    ],
    ids=str,
)
def test_losses_of_the_margins_3_and_minus_a_half(section: dict[str, Any], expected: float) -> None:
    assert measured(reference_policy_kl_penalty=0.5, **section)[0] == pytest.approx(expected)


def test_loss_and_metrics_are_those_by_hand() -> None:
    loss, metrics = measured(reference_policy_kl_penalty=0.5, sft_loss_weight=0.1, preference_loss_weight=2.0)
    preference = (softplus(1.5) + softplus(-0.25)) / 2
    assert metrics == pytest.approx(
        {
            "preference_loss": preference,
            "sft_loss": sum(NLL) / 2,
            "accuracy": 0.5,
            "rewards_chosen_mean": 1.25,
            "rewards_rejected_mean": 0.0,
            "num_valid_samples": 2,
        }
    )
    assert loss == pytest.approx(2 * preference + 0.1 * sum(NLL) / 2)


def test_averages_are_over_the_tokens_of_each_answer() -> None:
    loss, metrics = measured(
        reference_policy_kl_penalty=0.5,
        preference_average_log_probs=True,
        sft_average_log_probs=True,
        sft_loss_weight=1,
    )
    preference = (softplus(1.0) + softplus(0.0)) / 2
    assert metrics["preference_loss"] == pytest.approx(preference)
    assert metrics["sft_loss"] == pytest.approx((1.5 + 0.5) / 2)
    assert metrics["rewards_chosen_mean"] == pytest.approx(0.75)
    assert metrics["accuracy"] == 0.5  # a tie counts as wrong
    assert loss == pytest.approx(preference + 1.0)


def test_a_policy_equal_to_its_reference_has_the_loss_of_a_coin() -> None:
    pairs = batch()
    scores = TokenScores(pairs[keys.REFERENCE_LOGPROBS])
    loss, _ = PreferenceLoss(DPOConfig())(scores, pairs, Normalizer(6.0, 4.0))
    assert loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("parts", [([0, 1], [2, 3]), ([3, 0, 2, 1],), ([1, 0], [3, 2])])
def test_micro_batches_add_up_whatever_the_order_of_rows(parts: tuple[list[int], ...]) -> None:
    whole, expected = measured(sft_loss_weight=0.3)
    found = [measured(torch.tensor(part), sft_loss_weight=0.3) for part in parts]
    assert sum(loss for loss, _ in found) == pytest.approx(whole)
    assert {name: sum(metrics[name] for _, metrics in found) for name in expected} == pytest.approx(expected)


def test_the_gradient_pulls_the_answers_apart_by_the_error_of_the_ranking() -> None:
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    loss, _ = PreferenceLoss(DPOConfig(reference_policy_kl_penalty=0.5))(
        TokenScores(logprobs), batch(), Normalizer(6.0, 4.0)
    )
    loss.backward()
    weight = [0.5 * 0.5 / (1 + math.exp(margin)) for margin in (1.5, -0.25)]  # beta * sigmoid(-beta * margin) / pairs
    assert logprobs.grad is not None
    assert logprobs.grad[:, 2].tolist() == pytest.approx([-weight[0], weight[0], -weight[1], weight[1]])
    assert logprobs.grad[:, :2].abs().max() == 0
    assert logprobs.grad[1:3, 3].abs().max() == 0  # padding


def test_a_pair_without_weight_is_left_out() -> None:
    pairs = batch()
    pairs[keys.SAMPLE_MASK] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    loss, metrics = PreferenceLoss(DPOConfig(reference_policy_kl_penalty=0.5))(
        TokenScores(torch.tensor(LOGPROBS)), pairs, Normalizer(3.0, 2.0)
    )
    assert loss.item() == pytest.approx(softplus(1.5))
    assert float(metrics["num_valid_samples"].value) == 1
