import torch

from nemo_rl.interfaces import Metric, Normalizer
from nemo_rl.policy.training import (
    OptimizerStep,
    Reduction,
    accumulate_metric,
    reduce_over_optimizer_steps,
    reduce_over_ranks,
)


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
    metrics, known = reduce_over_ranks([({}, {}), (one, reductions), (two, reductions)])
    assert metrics == {"loss": 3.0, "low": -4.0, "high": 5.0, "samples": 7.0}
    assert known == reductions


def test_sums_are_averaged_over_optimizer_steps_counts_and_extremes_are_not() -> None:
    reductions: dict[str, Reduction] = {"loss": "sum", "low": "min", "high": "max", "samples": "count"}
    steps = [
        OptimizerStep(
            {"loss": 1.0, "low": -1.0, "high": 5.0, "samples": 4.0}, reductions, Normalizer(10, 2), 3.0, False
        ),
        OptimizerStep(
            {"loss": 2.0, "low": -4.0, "high": 2.0, "samples": 3.0}, reductions, Normalizer(20, 3), float("nan"), True
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
    }
