"""Scoring and one optimizer step on Megatron's stages: micro-batches, gradients, clipping, the optimizer."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn
from torch.optim import Optimizer

from nemo_rl import batch as keys
from nemo_rl.interfaces import LossFn, Metric, Normalizer, RequiredScores, TokenScores, TopK
from nemo_rl.policy.megatron.optimizer import MainWeights
from nemo_rl.policy.megatron.parallel import megatron_device_context
from nemo_rl.policy.micro_batches import MicroBatching, count_valid, micro_batches
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.training import OptimizerStep, Reduction, accumulate_metric, reduce_over_ranks
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)

IndexedMicroBatch = tuple[torch.Tensor, TrainingBatch]  # rows of the batch, and the micro-batch itself


def score(
    module: nn.Module,
    batch: TrainingBatch,
    wanted: RequiredScores,
    *,
    size: MicroBatching,
    device: torch.device,
    layout: RankLayout,
) -> Iterator[tuple[torch.Tensor, TokenScores]]:
    """Return an iterator of (rows, scores) of this rank's rows, without gradients; only the last stage has any.

    All micro-batches are computed before the first is returned; their scores wait on the CPU.
    """

    def move_to_cpu(
        part: IndexedMicroBatch, scores: TokenScores, *, non_loss_data: bool
    ) -> tuple[torch.Tensor, TokenScores]:
        topk = scores.topk and TopK(scores.topk.ids.cpu(), scores.topk.logprobs.cpu())
        return part[0], TokenScores(scores.logprobs.cpu(), topk=topk)

    inputs = batch.select(keys.TOKEN_IDS, keys.TOKEN_MASK, keys.LENGTHS)
    parts = list(micro_batches(inputs, torch.arange(len(batch)), size, layout))
    with torch.no_grad():
        read = _run(module, parts, wanted, move_to_cpu, device=device, forward_only=True, collect_non_loss_data=True)
    return ((rows, scores) for rows, scores in read if len(rows) > 0)


def accumulate_gradients(
    module: nn.Module,
    parts: Sequence[IndexedMicroBatch],
    wanted: RequiredScores,
    loss: Callable[[IndexedMicroBatch, TokenScores], tuple[torch.Tensor, Any]],
    *,
    device: torch.device,
) -> list[Any]:
    """Sum the gradients of all losses, also over ranks, and return the reports of `loss` on the last stage."""

    def loss_and_report(part: IndexedMicroBatch, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor, Any]:
        value, report = loss(part, scores)
        # The stage before waits for a gradient also where the loss reads no log-prob. A tensor of its own, of one
        # entry, since the schedule frees it before the backward pass.
        value = value.new_ones(1) * value + scores.logprobs.sum() * 0
        return value, torch.zeros((), dtype=torch.int, device=device), report

    return _run(module, parts, wanted, loss_and_report, device=device, forward_only=False)


def _run(
    module: nn.Module,
    parts: Sequence[IndexedMicroBatch],
    wanted: RequiredScores,
    read: Callable[..., Any],
    *,
    device: torch.device,
    **arguments: Any,
) -> list[Any]:
    def forward_step(iterator: Iterator[IndexedMicroBatch], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        rows, part = next(iterator)
        lengths = part[keys.LENGTHS].tolist()
        part = part.to(device)
        asked = wanted if len(rows) else RequiredScores()  # a dummy part needs no scores
        candidate_ids = None if asked.candidates is None else part[asked.candidates]
        scores = model(part[keys.TOKEN_IDS], part[keys.TOKEN_MASK] > 0, asked, candidate_ids, lengths)
        return scores, partial(read, (rows, part))

    width = max((part[keys.TOKEN_IDS].shape[1] for _, part in parts), default=1)
    with megatron_device_context(device):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=[module],
            num_microbatches=len(parts),
            seq_length=width,
            micro_batch_size=max((len(part) for _, part in parts), default=1),
            **arguments,
        )


@dataclass(frozen=True, slots=True)
class MegatronTrainer:
    """A stage and its optimizer, with its micro-batching and the limit of the gradient norm."""

    module: Any  # megatron.core's DistributedDataParallel around a Stage
    main: MainWeights
    device: torch.device
    optimizer: Optimizer
    batching: MicroBatching
    max_grad_norm: float | None
    layout: RankLayout

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep:
        """Take one optimizer step on these rows and return its report, which is the same on every rank.

        A step without valid tokens, or with a non-finite gradient, is skipped.
        """
        normalizer = count_valid(batch, rows)
        if normalizer.num_valid_tokens == 0:
            logger.warning("skipped an optimizer step of %d samples without a valid token", len(rows))
            return OptimizerStep({"loss": 0.0}, {"loss": "sum"}, normalizer, grad_norm=None, is_skipped=True)

        def loss(part: IndexedMicroBatch, scores: TokenScores) -> tuple[torch.Tensor, dict[str, Metric]]:
            return _loss(part, scores, loss_fn, normalizer)

        parts = list(micro_batches(batch, rows, self.batching, self.layout))
        self.module.zero_grad_buffer()
        reports = accumulate_gradients(self.module, parts, loss_fn.required_scores, loss, device=self.device)
        grad_norm = self._step()
        values, reductions = reduce_over_ranks(self.layout.all_gather_data_parallel(_aggregate_metrics(reports)))
        return OptimizerStep(values, reductions, normalizer, grad_norm, is_skipped=not math.isfinite(grad_norm))

    def _step(self) -> float:
        self.main.copy_gradients_from_buffers()
        grad_norm = self.main.clip(self.max_grad_norm)
        if math.isfinite(grad_norm):
            self.optimizer.step()
            self.main.copy_to_model()
        else:
            logger.warning("skipped an optimizer step: gradient norm is %s; weights are unchanged", grad_norm)
        self.main.clear_gradients()
        return grad_norm


def _loss(
    part: IndexedMicroBatch, scores: TokenScores, loss_fn: LossFn, normalizer: Normalizer
) -> tuple[torch.Tensor, dict[str, Metric]]:
    rows, batch = part
    if len(rows) == 0:  # zero gradients, in step with the ranks that have samples left
        return scores.logprobs.sum() * 0, {}
    loss, metrics = loss_fn(scores, batch, normalizer)
    return loss, {**metrics, "loss": Metric(loss.detach().clone())}  # the schedule frees its inputs


def _aggregate_metrics(reports: list[dict[str, Metric]]) -> tuple[dict[str, float], dict[str, Reduction]]:
    """Return the metrics of all micro-batches of a rank; only the last stage has any."""
    metrics: dict[str, torch.Tensor] = {}
    reductions: dict[str, Reduction] = {}
    for report in reports:
        for name, metric in report.items():
            metrics[name] = accumulate_metric(metric, metrics.get(name))
            reductions[name] = metric.reduction
    return {name: float(value) for name, value in metrics.items()}, reductions
