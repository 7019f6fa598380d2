"""One optimizer step, on all ranks together: micro-batches, gradients, clipping, the optimizer."""

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nemo_rl import batch as keys
from nemo_rl.interfaces import LossFn, Metric, Normalizer, TokenScores
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import MicroBatching, count_valid, micro_batches
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.policy.sharding import num_holders
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

Reduction = Literal["sum", "count", "min", "max"]


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one optimizer step reports."""

    metrics: dict[str, float]  # the loss function's, and `loss`
    reductions: dict[str, Reduction]  # of each metric: sum, count, min or max
    normalizer: Normalizer
    grad_norm: float | None  # before clipping; None: there was nothing to learn from
    is_skipped: bool


@dataclass(frozen=True, slots=True)
class Trainer:
    """Module and optimizer, and which samples go through together and how large a gradient may be."""

    module: CausalLogprobs
    device: torch.device
    optimizer: Optimizer
    batching: MicroBatching
    max_grad_norm: float | None
    layout: RankLayout = SINGLE_RANK

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep:
        """Learn from these rows once; what is reported is the same on every rank.

        Not applied: a step without valid tokens, or with a non-finite gradient.
        """
        normalizer = count_valid(batch, rows)
        if normalizer.num_valid_tokens == 0:
            logger.warning("an optimizer step of %d samples has no valid token and is skipped", len(rows))
            return OptimizerStep({"loss": 0.0}, {"loss": "sum"}, normalizer, grad_norm=None, is_skipped=True)
        metrics: dict[str, torch.Tensor] = {}
        reductions: dict[str, Reduction] = {}
        for own_rows, part in micro_batches(batch, rows, self.batching, self.layout):
            lengths = part[keys.LENGTHS].tolist()
            part = part.to(self.device)
            if len(own_rows) == 0:  # of no token: zeros, in step with the ranks that have samples left
                self.module(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0, lengths=lengths).logprobs.sum().backward()
                continue
            wanted = loss_fn.required_scores
            candidate_ids = None if wanted.candidates is None else part[wanted.candidates]
            scores = self.module(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0, wanted, candidate_ids, lengths)
            for name, metric in self._backward(scores, part, normalizer, loss_fn).items():
                metrics[name] = accumulate_metric(metric, metrics.get(name))
                reductions[name] = metric.reduction
        grad_norm = clip_grad_norm(self.module.parameters(), self.max_grad_norm, self.layout)
        is_skipped = not math.isfinite(grad_norm)
        if is_skipped:
            logger.warning("gradient norm %s: the optimizer step is skipped, the weights stay as they are", grad_norm)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        values = {name: float(value) for name, value in metrics.items()}
        values, reductions = reduce_over_ranks(self.layout.all_gather_data_parallel((values, reductions)))
        return OptimizerStep(values, reductions, normalizer, grad_norm, is_skipped)

    def _backward(
        self, scores: TokenScores, part: TrainingBatch, normalizer: Normalizer, loss_fn: LossFn
    ) -> dict[str, Metric]:
        """Add this rank's part of the gradient. FSDP2 takes the mean over ranks, and what is wanted is the sum."""
        loss, metrics = loss_fn(scores, part, normalizer)
        num_ranks = self.layout.data_parallel_size
        if num_ranks > 1:
            (loss * num_ranks + scores.logprobs.sum() * 0).backward()  # also where this rank's loss reads no log-prob
        elif loss.requires_grad:
            loss.backward()
        return {**metrics, "loss": Metric(loss)}


def accumulate_metric(metric: Metric, accumulated: torch.Tensor | None) -> torch.Tensor:
    """A metric of one more micro-batch; stays on its device, so that nothing waits for it."""
    value = metric.value.detach()
    if accumulated is None:
        return value
    if metric.reduction in ("sum", "count"):
        return accumulated + value
    return torch.minimum(accumulated, value) if metric.reduction == "min" else torch.maximum(accumulated, value)


def reduce_over_ranks(
    parts: list[tuple[dict[str, float], dict[str, Reduction]]],
) -> tuple[dict[str, float], dict[str, Reduction]]:
    """Metrics of all ranks from those of each, and their reductions; a rank without a sample has none."""
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


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float | None, layout: RankLayout = SINGLE_RANK
) -> float:
    """The gradients' norm over all ranks before they are scaled to at most `max_norm`; None: measured only."""
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = _total_norm(with_gradient, layout)
    if max_norm is not None:
        for part in _group_by_mesh(with_gradient):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return float(norm)


def _total_norm(parameters: list[nn.Parameter], layout: RankLayout) -> torch.Tensor:
    """The norm of all gradients; among ranks in one sum, which each of them gets alike."""
    local: dict[int, list[torch.Tensor]] = defaultdict(list)
    for p in parameters:
        assert p.grad is not None
        gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        local[num_holders(p, layout.world_size)].append(gradient)
    norms = {holders: torch.nn.utils.get_total_norm(gradients) for holders, gradients in local.items()}
    if layout.world_size == 1:
        return norms.get(1, torch.zeros(()))
    square = sum(float(norm) ** 2 / holders for holders, norm in norms.items())
    return layout.all_reduce_sum(torch.tensor(square, dtype=torch.float64)).sqrt().float()


def _group_by_mesh(parameters: list[nn.Parameter]) -> Collection[list[nn.Parameter]]:
    """With tensor parallelism some lie on both dimensions of the mesh and some on one; torch scales them apart."""
    parts: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        parts[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return parts.values()


def reduce_over_optimizer_steps(steps: list[OptimizerStep]) -> dict[str, float]:
    """One training step's metrics: sums are averaged over optimizer steps, counts and extremes are of all."""
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
    }


def _reduce_over_steps(values: list[float], reduction: str) -> float:
    if reduction in ("min", "max"):
        return min(values) if reduction == "min" else max(values)
    return sum(values) if reduction == "count" else sum(values) / len(values)
