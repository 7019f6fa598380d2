"""Reports of optimizer steps: causes of skipped ones, and metrics reduced over micro-batches, ranks and steps."""

import logging
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from nemo_rl.loss_types import Metric, Normalizer

logger = logging.getLogger(__name__)
Reduction = Literal["sum", "count", "min", "max"]
SkipCause = Literal["no_valid_tokens", "nonfinite_loss", "nonfinite_gradient"]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    metrics: dict[str, float]  # the loss function's, and `loss`
    reductions: dict[str, Reduction]  # by metric
    normalizer: Normalizer
    grad_norm: float | None  # before clipping; None: no valid token
    skip_cause: SkipCause | None  # None: the step was taken

    @property
    def is_skipped(self) -> bool:
        """Return whether the weights stayed as they were."""
        return self.skip_cause is not None


def skip_without_tokens(normalizer: Normalizer, num_samples: int) -> OptimizerStep:
    """Return the report of a step that has nothing to train on, with a warning."""
    logger.warning("skipped an optimizer step of %d samples without a valid token", num_samples)
    return OptimizerStep({"loss": 0.0}, {"loss": "sum"}, normalizer, grad_norm=None, skip_cause="no_valid_tokens")


def find_skip_cause(loss: float, grad_norm: float) -> SkipCause | None:
    """Return why a step with this loss and gradient must be skipped, with a warning; None: it can be taken.

    A loss of NaN may have a finite gradient if its cause is clamped or masked; such a step would learn from an
    arbitrary part of its batch.
    """
    cause: SkipCause | None = None
    if not math.isfinite(loss):
        cause = "nonfinite_loss"
    elif not math.isfinite(grad_norm):
        cause = "nonfinite_gradient"
    if cause is not None:
        logger.warning(
            "skipped an optimizer step: loss is %s, gradient norm is %s; weights are unchanged", loss, grad_norm
        )
    return cause


def accumulate_metric(metric: Metric, accumulated: torch.Tensor | None) -> torch.Tensor:
    """Return the metric accumulated over one more micro-batch; it stays on its device, so that nothing synchronizes."""
    value = metric.value.detach()
    if accumulated is None:
        return value
    if metric.reduction in ("sum", "count"):
        return accumulated + value
    return torch.minimum(accumulated, value) if metric.reduction == "min" else torch.maximum(accumulated, value)


def reduce_over_ranks(
    parts: list[tuple[dict[str, float], dict[str, Reduction]]],
) -> tuple[dict[str, float], dict[str, Reduction]]:
    """Return the metrics of all ranks and their reductions from those of each; one without samples has no metrics."""
    if len(parts) == 1:
        return parts[0]
    collected: dict[str, list[float]] = defaultdict(list)
    reductions: dict[str, Reduction] = {}
    for values, reductions_of_part in parts:
        reductions |= reductions_of_part
        for name, value in values.items():
            collected[name].append(value)
    combine = {"sum": sum, "count": sum, "min": min, "max": max}
    return {name: combine[reductions[name]](values) for name, values in collected.items()}, reductions


def reduce_over_optimizer_steps(steps: list[OptimizerStep]) -> dict[str, float]:
    """Return the metrics of one training step: sums are averaged over optimizer steps, counts are added up, and
    minima and maxima are those of all steps."""
    collected: dict[str, list[float]] = defaultdict(list)
    reductions: dict[str, Reduction] = {}
    for step in steps:
        reductions.update(step.reductions)
        for name, value in step.metrics.items():
            collected[name].append(value)
    metrics = {name: _reduce_over_steps(values, reductions[name]) for name, values in collected.items()}
    norms = [s.grad_norm for s in steps if s.grad_norm is not None]
    finite = [n for n in norms if math.isfinite(n)]
    return {
        **metrics,
        "grad_norm": sum(finite) / len(finite) if finite else (norms or [0.0])[0],
        "global_valid_seqs": sum(s.normalizer.num_valid_trajectories for s in steps),
        "global_valid_toks": sum(s.normalizer.num_valid_tokens for s in steps),
        "num_optimizer_steps": float(sum(not s.is_skipped for s in steps)),
        "num_skipped_steps": float(sum(s.is_skipped for s in steps)),
        **{f"skipped_steps/{cause}": float(sum(s.skip_cause == cause for s in steps)) for cause in get_args(SkipCause)},
    }


def _reduce_over_steps(values: list[float], reduction: Reduction) -> float:
    if reduction in ("min", "max"):
        return min(values) if reduction == "min" else max(values)
    return sum(values) if reduction == "count" else sum(values) / len(values)
