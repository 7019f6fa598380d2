"""One training step on the policy's thread: micro-batches, gradients, clipping, the optimizer."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from nemo_rl import batch as keys
from nemo_rl.interfaces import LossFn, Metric, Normalizer
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import count_valid, micro_batches
from nemo_rl.policy.sharding import whole
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one optimizer step reports."""

    metrics: dict[str, float]  # the loss function's, and `loss`
    reductions: dict[str, str]  # of each metric: sum, count, min or max
    normalizer: Normalizer
    grad_norm: float | None  # before clipping; None: there was nothing to learn from
    is_skipped: bool


@dataclass(frozen=True, slots=True)
class Trainer:
    """Module and optimizer, and how large a micro-batch and a gradient may be."""

    module: CausalLogprobs
    device: torch.device
    optimizer: Optimizer
    micro_batch_size: int
    max_grad_norm: float | None

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep:
        """Learn from these rows once. Not applied: a step without valid tokens, or with a non-finite gradient."""
        normalizer = count_valid(batch, rows)
        if normalizer.num_valid_tokens == 0:
            logger.warning("an optimizer step of %d samples has no valid token and is skipped", len(rows))
            return OptimizerStep({"loss": 0.0}, {"loss": "sum"}, normalizer, grad_norm=None, is_skipped=True)
        metrics: dict[str, torch.Tensor] = {}
        reductions: dict[str, str] = {}
        for _, part in micro_batches(batch, rows, self.micro_batch_size):
            for name, metric in self._backward(part, normalizer, loss_fn).items():
                metrics[name] = reduced(metric, metrics.get(name))
                reductions[name] = metric.reduction
        grad_norm = clip_grad_norm(self.module.parameters(), self.max_grad_norm)
        is_skipped = not math.isfinite(grad_norm)
        if is_skipped:
            logger.warning("gradient norm %s: the optimizer step is skipped, the weights stay as they are", grad_norm)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        values = {name: float(value) for name, value in metrics.items()}
        return OptimizerStep(values, reductions, normalizer, grad_norm, is_skipped)

    def _backward(self, part: TrainingBatch, normalizer: Normalizer, loss_fn: LossFn) -> dict[str, Metric]:
        part = part.to(self.device)
        logprobs = self.module(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0)
        loss, metrics = loss_fn(logprobs, part, normalizer)
        if loss.requires_grad:
            loss.backward()
        return {**metrics, "loss": Metric(loss)}


def reduced(metric: Metric, so_far: torch.Tensor | None) -> torch.Tensor:
    """A metric of one more micro-batch; stays on its device, so that nothing waits for it."""
    value = metric.value.detach()
    if so_far is None:
        return value
    if metric.reduction in ("sum", "count"):
        return so_far + value
    return torch.minimum(so_far, value) if metric.reduction == "min" else torch.maximum(so_far, value)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """The gradients' norm before they are scaled to at most `max_norm`; None: measured only."""
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return float(whole(norm))


def over_optimizer_steps(steps: list[OptimizerStep]) -> dict[str, float]:
    """One training step's metrics: sums are averaged over optimizer steps, counts and extremes are of all."""
    collected: dict[str, list[float]] = defaultdict(list)
    reductions: dict[str, str] = {}
    for step in steps:
        reductions.update(step.reductions)
        for name, value in step.metrics.items():
            collected[name].append(value)
    metrics = {name: _over_steps(values, reductions[name]) for name, values in collected.items()}
    norms = [s.grad_norm for s in steps if s.grad_norm is not None]
    finite = [n for n in norms if math.isfinite(n)]
    return {
        **metrics,
        "grad_norm": sum(finite) / len(finite) if finite else (norms or [0.0])[0],
        "global_valid_seqs": sum(s.normalizer.num_valid_trajectories for s in steps),
        "global_valid_toks": sum(s.normalizer.num_valid_tokens for s in steps),
        "num_optimizer_steps": float(sum(not s.is_skipped for s in steps)),
        "num_skipped_steps": float(sum(s.is_skipped for s in steps)),
    }


def _over_steps(values: list[float], reduction: str) -> float:
    if reduction in ("min", "max"):
        return min(values) if reduction == "min" else max(values)
    return sum(values) if reduction == "count" else sum(values) / len(values)
