"""Scoring and one optimizer step on FSDP2: micro-batches, gradients, clipping, the optimizer; on all ranks together."""

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nemo_rl import batch as keys
from nemo_rl.interfaces import LossFn, Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy.fsdp2.sharding import num_holders
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import MicroBatching, count_valid, micro_batches
from nemo_rl.policy.ranks import SINGLE_RANK, RankLayout
from nemo_rl.policy.training import OptimizerStep, Reduction, accumulate_metric, reduce_over_ranks
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)


@torch.no_grad()
def score_micro_batches(
    module: nn.Module,
    batch: TrainingBatch,
    wanted: RequiredScores,
    *,
    size: MicroBatching | int,
    device: torch.device,
    layout: RankLayout,
) -> Iterator[tuple[torch.Tensor, TokenScores]]:
    """Yield (rows, scores) of this rank's rows, a micro-batch of `size` at a time; `module` is a `CausalLogprobs`."""
    inputs = batch.select(keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS)
    for rows, part in micro_batches(inputs, torch.arange(len(batch)), size, layout):
        lengths = part[keys.LENGTHS].tolist()
        part = part.to(device)
        scores = module(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0, wanted, lengths=lengths)
        if len(rows) > 0:
            yield rows, scores


@dataclass(frozen=True, slots=True)
class FSDP2Trainer:
    """Module and optimizer of one rank, with its micro-batching and the limit of the gradient norm."""

    module: CausalLogprobs
    device: torch.device
    optimizer: Optimizer
    batching: MicroBatching
    max_grad_norm: float | None
    layout: RankLayout = SINGLE_RANK

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep:
        """Take one optimizer step on these rows and return its report, which is the same on every rank.

        A step without valid tokens, or with a non-finite gradient, is skipped.
        """
        normalizer = count_valid(batch, rows)
        if normalizer.num_valid_tokens == 0:
            logger.warning("skipped an optimizer step of %d samples without a valid token", len(rows))
            return OptimizerStep({"loss": 0.0}, {"loss": "sum"}, normalizer, grad_norm=None, is_skipped=True)
        metrics: dict[str, torch.Tensor] = {}
        reductions: dict[str, Reduction] = {}
        for own_rows, part in micro_batches(batch, rows, self.batching, self.layout):
            lengths = part[keys.LENGTHS].tolist()
            part = part.to(self.device)
            if len(own_rows) == 0:  # zero gradients, in step with the ranks that have samples left
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
            logger.warning("skipped an optimizer step: gradient norm is %s; weights are unchanged", grad_norm)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        values = {name: float(value) for name, value in metrics.items()}
        values, reductions = reduce_over_ranks(self.layout.all_gather_data_parallel((values, reductions)))
        return OptimizerStep(values, reductions, normalizer, grad_norm, is_skipped)

    def _backward(
        self, scores: TokenScores, part: TrainingBatch, normalizer: Normalizer, loss_fn: LossFn
    ) -> dict[str, Metric]:
        """Add this rank's part of the gradient. FSDP2 averages over ranks where the sum is needed, hence the factor."""
        loss, metrics = loss_fn(scores, part, normalizer)
        num_ranks = self.layout.data_parallel_size
        if num_ranks > 1:
            (loss * num_ranks + scores.logprobs.sum() * 0).backward()  # also where this rank's loss reads no log-prob
        elif loss.requires_grad:
            loss.backward()
        return {**metrics, "loss": Metric(loss)}


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float | None, layout: RankLayout = SINGLE_RANK
) -> float:
    """Scale the gradients to a norm of at most `max_norm` and return their norm before; None: only measure it."""
    with_gradient = [p for p in parameters if p.grad is not None]
    norm = _total_norm(with_gradient, layout)
    if max_norm is not None:
        for part in _group_by_mesh(with_gradient):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return float(norm)


def _total_norm(parameters: list[nn.Parameter], layout: RankLayout) -> torch.Tensor:
    """Return the norm of all gradients over all ranks, the same on each of them."""
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
    """Group parameters by device mesh: with tensor parallelism they are on one or two dimensions of it, and torch
    scales only gradients of one mesh together."""
    parts: dict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        parts[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return parts.values()
