import math
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import Metric, Normalizer, TokenScores
from nemo_rl.policy.fsdp2.worker import FSDP2Trainer
from nemo_rl.policy.micro_batches import SampleCount
from nemo_rl.policy.training import (
    OptimizerStep,
    Reduction,
    accumulate_metric,
    check_optimizer,
    find_skip_cause,
    make_optimizer,
    reduce_over_optimizer_steps,
    reduce_over_ranks,
)
from tests.unit.policy.tiny import WeightedNLL, learning_rates, make_batch


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


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000}}


def config(**sections: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"model_name": "unused", **sections})


def test_lists_become_tuples_and_adam_is_fused() -> None:
    optimizer = make_optimizer(config(), [torch.nn.Parameter(torch.ones(2))])
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.9, 0.999)
    assert optimizer.defaults["fused"] is True


def test_user_chooses_the_kernel() -> None:
    section = config(optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3, "foreach": False, "fused": False}})
    assert make_optimizer(section, [torch.nn.Parameter(torch.ones(2))]).defaults["fused"] is False


def test_default_learning_rate_stays() -> None:
    assert learning_rates(config(), 3) == [5e-6] * 3


def test_stages_follow_each_other_at_the_milestones() -> None:
    section = config(
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}},
        scheduler=[LINEAR, CONSTANT, {"milestones": [3]}],
    )
    assert learning_rates(section, 6) == pytest.approx([0.1, 0.4, 0.7, 1.0, 1.0, 1.0])


def test_single_scheduler_needs_no_list() -> None:
    section = config(optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}, scheduler=LINEAR)
    assert learning_rates(section, 5) == pytest.approx([0.1, 0.4, 0.7, 1.0, 1.0])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"kwargs": {"lrr": 1e-3}}}, r"policy\.optimizer\.kwargs\.lrr .*did you mean .*kwargs\.lr\?"),
        ({"optimizer": {"kwargs": {"lr": -1}}}, r"policy\.optimizer\.kwargs .*Invalid learning rate"),
        ({"optimizer": {"name": "torch.optim.adamw"}}, r"policy\.optimizer\.name .*"),
        ({"optimizer": {"name": "torch.optim.Adamw"}}, r"policy\.optimizer\.name .*did you mean torch\.optim\.AdamW"),
        ({"optimizer": {"name": "AdamW"}}, r"policy\.optimizer\.name .*module"),
        ({"optimizer": {"name": "nowhere.AdamW"}}, r"policy\.optimizer\.name .*nowhere"),
        ({"scheduler": {"kwargs": {}}}, r"policy\.scheduler\.name .*dotted path"),
        ({"scheduler": [LINEAR, {"name": "torch.optim.AdamW"}]}, r"policy\.scheduler\.1\.name .*no LRScheduler"),
        ({"scheduler": [LINEAR, CONSTANT]}, r"policy\.scheduler .*milestones"),
        ({"scheduler": [LINEAR, CONSTANT, {"milestones": [3, 6]}]}, r"policy\.scheduler\.2\.milestones .*1 milestones"),
        (
            {"scheduler": [LINEAR, CONSTANT, CONSTANT, {"milestones": [6, 3]}]},
            r"policy\.scheduler\.3\.milestones .*rise",
        ),
        ({"scheduler": {"milestones": [3]}}, r"policy\.scheduler\.milestones .*list"),
        ({"scheduler": {**LINEAR, "kwargs": {"steps": 3}}}, r"policy\.scheduler\.kwargs\.steps .*unknown key"),
        ({"scheduler": {"name": "torch.optim.lr_scheduler.StepLR"}}, r"policy\.scheduler\.kwargs .*step_size"),
        ({"scheduler": {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}, r"policy\.scheduler\.name .*metric"),
    ],
)
def test_what_is_wrong_is_named(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_optimizer(config(**sections))


def test_what_is_right_passes() -> None:
    check_optimizer(config(scheduler=[LINEAR, CONSTANT, {"milestones": [3]}]))


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
