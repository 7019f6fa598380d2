import math

import pytest
import torch

from nemo_rl.losses.policy_gradient import engine_mismatch_metrics
from tests.unit.losses.evaluation import (
    CURRENT,
    GENERATION,
    PREV,
    evaluate,
    three_tokens,
)


def test_ratio_metrics() -> None:
    metrics = evaluate(three_tokens(), [CURRENT])[2]
    expected = {
        "probs_ratio": 1.0,
        "probs_ratio_min": 0.5,
        "probs_ratio_max": 1.5,
        "probs_ratio_clamped": (0.8 + 1.0 + 1.2) / 3,
        "probs_ratio_clamped_min": 0.8,
        "probs_ratio_clamped_max": 1.2,
        "num_valid_samples": 1.0,
        "kl_penalty": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_metrics_of_trainer_against_engine() -> None:
    metrics = evaluate(three_tokens(), [CURRENT])[2]
    errors = [-0.5, 0.5, -0.2]  # lp_prev - lp_gen

    def mean(values: list[float]) -> float:
        return sum(values) / 3

    def k3(d: float) -> float:
        return math.exp(d) - 1 - d

    def divergence(prev: float, generation: float) -> float:
        mixture = math.log((math.exp(prev) + math.exp(generation)) / 2)
        return (k3(prev - mixture) + k3(generation - mixture)) / 2

    tokens = list(zip(CURRENT[1:], PREV[1:], GENERATION[1:], strict=True))
    expected = {
        "token_mult_prob_error": mean([math.exp(abs(e)) for e in errors]),
        "gen_kl_error": mean([k3(e) for e in errors]),
        "policy_kl_error": mean([k3(-e) for e in errors]),
        "js_divergence_error": mean([divergence(prev, gen) for _, prev, gen in tokens]),
        "sampling_importance_ratio": mean([math.exp(e) for e in errors]),
        "approx_entropy": mean([-math.exp(lp - gen) * lp for lp, _, gen in tokens]),
        "max_logprob_error": 0.5,
        "is_oob_ratio": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_a_loss_without_a_ratio_compares_trainer_and_engine_on_trained_tokens_only() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    logprobs = torch.tensor([[50.0, -1.0, -2.0, 9.0]])
    generation = torch.tensor([[-math.inf, -1.5, -2.0, math.nan]])
    metrics = engine_mismatch_metrics(logprobs, generation, mask, 2.0)
    assert float(metrics["num_nonfinite_generation_logprobs"].value) == 0
    assert float(metrics["max_logprob_error"].value) == pytest.approx(0.5)
    assert float(metrics["token_mult_prob_error"].value) == pytest.approx((math.exp(0.5) + 1) / 2)
    assert float(metrics["approx_entropy"].value) == pytest.approx((math.exp(0.5) + 2) / 2)


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_logprob_that_is_not_finite_counts_as_no_error(logprob: float) -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    metrics = engine_mismatch_metrics(
        torch.tensor([[0.0, -1.0, -2.0]]), torch.tensor([[0.0, -1.5, logprob]]), mask, 2.0
    )
    values = {name: float(metric.value) for name, metric in metrics.items()}
    assert values["num_nonfinite_generation_logprobs"] == 1
    assert values["max_logprob_error"] == pytest.approx(0.5)
    assert values["token_mult_prob_error"] == pytest.approx((math.exp(0.5) + 1) / 2)
    assert values["gen_kl_error"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
