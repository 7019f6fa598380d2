import math
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.loss_types import Metric, Normalizer, TokenScores
from nemo_rl.policy.fsdp2.worker import FSDP2Trainer
from nemo_rl.policy.micro_batches import SampleCount
from nemo_rl.policy.step_report import (
    OptimizerStep,
    Reduction,
    accumulate_metric,
    find_skip_cause,
    reduce_over_optimizer_steps,
    reduce_over_ranks,
)
from tests.unit.policy.tiny import WeightedNLL, make_batch


def test_metrics_of_micro_batches_are_reduced_as_they_say() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert accumulate_metric(Metric(one), None) == 1
    assert accumulate_metric(Metric(one), two) == 3
    assert accumulate_metric(Metric(one, "count"), two) == 3
    assert accumulate_metric(Metric(one, "min"), two) == 1
    assert accumulate_metric(Metric(one, "max"), two) == 2


def test_metrics_of_ranks_are_reduced_as_they_say_and_a_rank_may_have_none() -> None:
    reductions: dict[str, Reduction] = {"loss": "sum", "low": "min", "high": "max", "samples": "count"}
    one = {"loss": 1.0, "low": -1.0, "high": 5.0, "samples": 4.0}
    two = {"loss": 2.0, "low": -4.0, "high": 2.0, "samples": 3.0}
    assert reduce_over_ranks([(one, reductions)]) == (one, reductions)
    assert reduce_over_ranks([(one, reductions), (two, reductions)])[0]["samples"] == 7.0
    metrics, known = reduce_over_ranks([({}, {}), (one, reductions), (two, reductions)])
    assert metrics == {"loss": 3.0, "low": -4.0, "high": 5.0, "samples": 7.0}
    assert known == reductions


def test_sums_are_averaged_over_optimizer_steps_counts_and_extremes_are_not() -> None:
    reductions: dict[str, Reduction] = {"loss": "sum", "low": "min", "high": "max", "samples": "count"}
    steps = [
        OptimizerStep(
            {"loss": 1.0, "low": -1.0, "high": 5.0, "samples": 4.0}, reductions, Normalizer(10, 2), 3.0, None
        ),
        OptimizerStep(
            {"loss": 2.0, "low": -4.0, "high": 2.0, "samples": 3.0},
            reductions,
            Normalizer(20, 3),
            float("nan"),
            "nonfinite_gradient",
        ),
    ]
    assert reduce_over_optimizer_steps(steps) == {
        "loss": 1.5,
        "low": -4.0,
        "high": 5.0,
        "samples": 7.0,
        "grad_norm": 3.0,
        "global_valid_seqs": 5,
        "global_valid_toks": 30,
        "num_optimizer_steps": 1,
        "num_skipped_steps": 1,
        "skipped_steps/no_valid_tokens": 0,
        "skipped_steps/nonfinite_loss": 0,
        "skipped_steps/nonfinite_gradient": 1,
    }


@pytest.mark.parametrize(
    ("norms", "expected"), [([1.0, 3.0], 2.0), ([math.inf, math.nan], math.inf), ([math.inf], math.inf), ([None], 0.0)]
)
def test_the_gradients_norm_is_the_mean_of_the_finite_ones(norms: list[float | None], expected: float) -> None:
    steps = [OptimizerStep({}, {}, Normalizer(1, 1), norm, None) for norm in norms]
    assert reduce_over_optimizer_steps(steps)["grad_norm"] == expected


@pytest.mark.parametrize(
    ("loss", "grad_norm", "cause"),
    [
        (1.0, 2.0, None),
        (math.nan, 2.0, "nonfinite_loss"),
        (-math.inf, 2.0, "nonfinite_loss"),
        (math.nan, math.nan, "nonfinite_loss"),
        (1.0, math.inf, "nonfinite_gradient"),
        (1.0, math.nan, "nonfinite_gradient"),
    ],
)
def test_a_step_with_a_loss_or_gradient_that_is_no_number_has_a_cause_to_be_skipped(
    loss: float, grad_norm: float, cause: str | None
) -> None:
    assert find_skip_cause(loss, grad_norm) == cause


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_leaves_the_weights_although_its_gradient_is_finite(value: float) -> None:
    class Spoilt(WeightedNLL):
        def __call__(
            self, scores: TokenScores, batch: TensorDict, normalizer: Normalizer
        ) -> tuple[torch.Tensor, dict[str, Metric]]:
            loss, metrics = super().__call__(scores, batch, normalizer)
            return loss + value, metrics  # adds nothing to the gradient

    parameter = torch.nn.Parameter(torch.ones(()))

    class OneParameter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parameter = parameter

        def forward(self, token_ids: torch.Tensor, *arguments: Any, **named: Any) -> TokenScores:
            return TokenScores(self.parameter.expand(token_ids.shape) * 1.0)

    trainer = FSDP2Trainer(
        cast(Any, OneParameter()), torch.device("cpu"), torch.optim.SGD([parameter], lr=1.0), SampleCount(2), None
    )
    report = trainer.optimizer_step(make_batch([4, 5]), torch.arange(2), Spoilt())
    assert report.skip_cause == "nonfinite_loss"
    assert math.isfinite(report.grad_norm or 0)
    assert parameter.item() == 1
    assert trainer.optimizer_step(make_batch([4, 5]), torch.arange(2), WeightedNLL()).skip_cause is None
    assert parameter.item() != 1
