import math
from typing import Any

import pytest
import torch

from nemo_rl.config.loss import PolicyGradientLossConfig
from nemo_rl.losses.policy_gradient import kl_estimate
from tests.unit.algorithms.batches import make_batch
from tests.unit.losses.evaluation import (
    evaluate,
)


def test_kl_k3_has_the_worked_value() -> None:
    batch = make_batch([[0, 1, 1, 1]], reference_logprobs=[[0.0, -1.0, -1.0, -1.0]])
    loss, _, metrics = evaluate(batch, [[0.0, 0.0, -1.0, -2.0]], reference_policy_kl_penalty=0.1)
    assert loss == pytest.approx(0.03621, abs=1e-5)
    assert metrics["kl_penalty"] == pytest.approx(0.3621, abs=1e-4)


@pytest.mark.parametrize(("kl_type", "expected"), [("k1", [1.0, 0.0, -1.0]), ("k2", [0.5, 0.0, 0.5])])
def test_kl_k1_and_k2(kl_type: str, expected: list[float]) -> None:
    for token, value in enumerate(expected, start=1):
        mask = [[1.0 if t == token else 0.0 for t in range(4)]]
        batch = make_batch(mask, reference_logprobs=[[-1.0] * 4])
        loss, _, _ = evaluate(
            batch, [[0.0, 0.0, -1.0, -2.0]], reference_policy_kl_penalty=1.0, reference_policy_kl_type=kl_type
        )
        assert loss == pytest.approx(value)


def test_kl_weight_carries_the_score_function_gradient() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.5]])
    _, gradient, _ = evaluate(batch, [[0.0, -1.0]], reference_policy_kl_penalty=1.0)
    d = -0.5
    k3 = math.exp(d) - 1 - d
    assert gradient[0, 1] == pytest.approx(k3 + 1 - math.exp(d))  # k3 * dw + w * dk3, dw = 1


def test_input_clamped_tokens_have_no_kl_gradient() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -4.0]])
    options: dict[str, Any] = {"reference_policy_kl_penalty": 1.0, "kl_input_clamp_value": 2.0}
    loss, gradient, _ = evaluate(batch, [[0.0, -1.0]], **options)
    assert loss == pytest.approx(math.exp(-2) + 1)
    assert gradient[0, 1] == 0


def test_on_policy_kl_approximation_weighs_by_the_engines_logprobs() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.5]], generation_logprobs=[[0.0, -1.2]])
    options: dict[str, Any] = {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": "k1"}
    loss, _, _ = evaluate(batch, [[0.0, -1.0]], use_on_policy_kl_approximation=True, **options)
    assert loss == pytest.approx(math.exp(0.2) * 0.5)


def test_kl_in_reward_leaves_the_loss_alone_and_is_still_measured() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.5]])
    loss, gradient, metrics = evaluate(batch, [[0.0, -1.0]], reference_policy_kl_penalty=1.0, use_kl_in_reward=True)
    assert (loss, gradient.abs().sum()) == (0.0, 0.0)
    assert metrics["kl_penalty"] > 0


def test_an_estimate_for_the_reward_is_clamped_twice_and_needs_no_gradient() -> None:
    config = PolicyGradientLossConfig(type="ppo", kl_input_clamp_value=2.0, kl_output_clamp_value=4.0)
    logprobs, reference = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.5, -9.0, 9.0])
    k3 = [math.exp(-0.5) - 0.5, math.exp(-2) + 1, 4.0]
    assert kl_estimate(logprobs, reference, config).tolist() == pytest.approx(k3)


def test_output_clamp_bounds_the_weighted_kl() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.0]])
    loss, gradient, _ = evaluate(batch, [[0.0, -5.0]], reference_policy_kl_penalty=0.5)  # k3 of d = 4: 49.6
    assert loss == pytest.approx(5.0)
    assert gradient[0, 1] == 0
