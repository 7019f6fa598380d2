"""One optimizer step on Megatron's stages: micro-batches through the pipeline, gradients, clipping, the optimizer."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nemo_rl.interfaces import LossFn, Metric, Normalizer, TokenScores
from nemo_rl.policy.megatron.optimizer import MainWeights
from nemo_rl.policy.megatron.pipeline import Part, learn
from nemo_rl.policy.micro_batches import MicroBatching, count_valid, micro_batches
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.training import OptimizerStep, Reduction, over_ranks, reduced
from nemo_rl.types import TrainingBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MegatronTrainer:
    """A stage and its optimizer, and which samples go through together and how large a gradient may be."""

    module: Any  # megatron.core's DistributedDataParallel around a Stage
    main: MainWeights
    device: torch.device
    optimizer: Optimizer
    batching: MicroBatching
    max_grad_norm: float | None
    layout: RankLayout

    def optimizer_step(self, batch: TrainingBatch, rows: torch.Tensor, loss_fn: LossFn) -> OptimizerStep:
        """Learn from these rows once; what is reported is the same on every rank.

        Not applied: a step without valid tokens, or with a non-finite gradient.
        """
        normalizer = count_valid(batch, rows)
        if normalizer.num_valid_tokens == 0:
            logger.warning("an optimizer step of %d samples has no valid token and is skipped", len(rows))
            return OptimizerStep({"loss": 0.0}, {"loss": "sum"}, normalizer, grad_norm=None, is_skipped=True)

        def loss(part: Part, scores: TokenScores) -> tuple[torch.Tensor, dict[str, Metric]]:
            return _loss(part, scores, loss_fn, normalizer)

        parts = list(micro_batches(batch, rows, self.batching, self.layout))
        self.module.zero_grad_buffer()
        reports = learn(self.module, parts, loss_fn.required_scores, loss, device=self.device)
        grad_norm = self._step()
        values, reductions = over_ranks(self.layout.gathered(_summed_up(reports)))
        return OptimizerStep(values, reductions, normalizer, grad_norm, is_skipped=not math.isfinite(grad_norm))

    def _step(self) -> float:
        self.main.take_gradients()
        grad_norm = self.main.clip(self.max_grad_norm)
        if math.isfinite(grad_norm):
            self.optimizer.step()
            self.main.write_back()
        else:
            logger.warning("gradient norm %s: the optimizer step is skipped, the weights stay as they are", grad_norm)
        self.main.drop_gradients()
        return grad_norm


def _loss(
    part: Part, scores: TokenScores, loss_fn: LossFn, normalizer: Normalizer
) -> tuple[torch.Tensor, dict[str, Metric]]:
    rows, batch = part
    if len(rows) == 0:  # of no token: in step with the ranks that have samples left
        return scores.logprobs.sum() * 0, {}
    loss, metrics = loss_fn(scores, batch, normalizer)
    return loss, {**metrics, "loss": Metric(loss.detach().clone())}  # the schedule frees what it is given


def _summed_up(reports: list[dict[str, Metric]]) -> tuple[dict[str, float], dict[str, Reduction]]:
    """Metrics of all micro-batches of a rank; only the last stage has some."""
    metrics: dict[str, torch.Tensor] = {}
    reductions: dict[str, Reduction] = {}
    for report in reports:
        for name, metric in report.items():
            metrics[name] = reduced(metric, metrics.get(name))
            reductions[name] = metric.reduction
    return {name: float(value) for name, value in metrics.items()}, reductions
