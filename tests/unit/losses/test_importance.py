import math
from typing import Any

import pytest
import torch

from nemo_rl.losses.policy_gradient import finite_exp
from tests.unit.losses.evaluation import (
    CURRENT,
    PREV,
    evaluate,
    three_tokens,
)


def test_importance_correction_has_the_worked_value() -> None:
    loss, _, _ = evaluate(three_tokens(), [CURRENT], use_importance_sampling_correction=True)
    assert loss == pytest.approx(-0.20650, abs=1e-5)


def test_gspo_correction_is_the_exp_of_the_sequences_sum() -> None:
    options: dict[str, Any] = {"type": "gspo"}
    plain, _, _ = evaluate(three_tokens(), [CURRENT], **options)
    corrected, _, metrics = evaluate(three_tokens(), [CURRENT], use_importance_sampling_correction=True, **options)
    assert metrics["sampling_importance_ratio"] == pytest.approx(math.exp(-0.5 + 0.5 - 0.2))
    assert corrected == pytest.approx(plain * math.exp(-0.2), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"truncated_importance_sampling_ratio": 1.2}, [0.60653, 1.2, 0.81873]),
        (
            {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.7},
            [0.7, 1.2, 0.81873],
        ),
        (
            {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_type": "icepop"},
            [0.60653, 0.0, 0.81873],
        ),
        (
            {
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.7,
                "truncated_importance_sampling_type": "icepop",
            },
            [0.0, 0.0, 0.81873],
        ),
        (  # geometric mean exp(-.2 / 3) = .9355
            {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_type": "seq-mask-tis"},
            [0.60653, 1.64872, 0.81873],
        ),
        (  # of all tokens' weights the geometric mean is within the bounds, their product, .8187, is not
            {
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.9,
                "truncated_importance_sampling_type": "seq-mask-tis",
            },
            [0.60653, 1.64872, 0.81873],
        ),
        (
            {
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.95,
                "truncated_importance_sampling_type": "seq-mask-tis",
            },
            [0.0, 0.0, 0.0],
        ),
    ],
)
def test_truncated_weights(options: dict[str, Any], weights: list[float]) -> None:
    _, gradient, _ = evaluate(
        three_tokens(), [PREV], use_importance_sampling_correction=True, type="reinforce", **options
    )
    expected = [-a * w / 3 for a, w in zip([1, -1, 2], weights, strict=True)]
    assert gradient[0, 1:].tolist() == pytest.approx(expected, abs=1e-5)


def test_out_of_bounds_ratio_is_the_share_of_tokens() -> None:
    options: dict[str, Any] = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2}
    assert evaluate(three_tokens(), [CURRENT], **options)[2]["is_oob_ratio"] == pytest.approx(1 / 3)


def test_finite_exp_is_zero_with_zero_gradient_where_exp_is_not_finite() -> None:
    x = torch.tensor([0.0, 1000.0, math.inf, -math.inf, math.nan], requires_grad=True)
    y = finite_exp(x)
    y.sum().backward()
    assert x.grad is not None
    assert y.tolist() == x.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
