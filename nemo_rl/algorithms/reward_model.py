"""Training of a reward model on preferences (Bradley and Terry): the better answer learns the higher score.

One process, float32. Made by launch/supervised.py; computes scores as environments/scorers does.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.config.supervised import RewardModelRunConfig
from nemo_rl.environments.scorers.classifier import score_padded


@dataclass(frozen=True, slots=True)
class TokenPair:
    """Two whole conversations as token ids."""

    chosen: Sequence[int]
    rejected: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step."""

    step: int
    metrics: dict[str, float]
    seconds: float


def bradley_terry_losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return `-log sigmoid(chosen - rejected)` of each pair, its negative log-likelihood: [N] from scores [N].

    Example: scores 2 and 0 give 0.127, equal scores 0.693.
    """
    return -nn.functional.logsigmoid(chosen - rejected)


def train_steps(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[TokenPair],
    config: RewardModelRunConfig,
) -> Iterator[StepResult]:
    """Train, and yield the result of each step, until `max_num_epochs` or `max_num_steps` is reached."""
    epochs = (batch for epoch in range(config.rm.max_num_epochs) for batch in _batches(pairs, config, epoch))
    for step, batch in zip(range(1, config.rm.max_num_steps + 1), epochs, strict=False):
        started_at = time.perf_counter()
        metrics = train_step(model, optimizer, batch, config)
        yield StepResult(step, metrics, time.perf_counter() - started_at)


def num_steps(num_pairs: int, config: RewardModelRunConfig) -> int:
    """Return the number of steps that `train_steps` makes."""
    num_data_steps = config.rm.max_num_epochs * -(-num_pairs // config.policy.train_global_batch_size)
    return min(config.rm.max_num_steps, num_data_steps)


def train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Sequence[TokenPair], config: RewardModelRunConfig
) -> dict[str, float]:
    """Run one optimizer step on the mean loss of the batch; return metrics without a prefix."""
    model.train()
    optimizer.zero_grad()
    size, margins = config.policy.train_micro_batch_size, []
    for start in range(0, len(batch), size):
        chosen, rejected = _scores(model, batch[start : start + size])
        loss = bradley_terry_losses(chosen, rejected).sum() / len(batch)
        loss.backward()
        margins.append((chosen - rejected).detach())
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.policy.max_grad_norm)
    optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    return {**_metrics(torch.cat(margins)), "grad_norm": grad_norm.item(), "lr": lr}


@torch.inference_mode()
def evaluate(model: PreTrainedModel, pairs: Sequence[TokenPair], *, batch_size: int) -> dict[str, float]:
    """Return loss, accuracy and margin over all pairs, without a prefix."""
    model.eval()
    margins = []
    for start in range(0, len(pairs), batch_size):
        chosen, rejected = _scores(model, pairs[start : start + batch_size])
        margins.append(chosen - rejected)
    return _metrics(torch.cat(margins))


def _scores(model: PreTrainedModel, pairs: Sequence[TokenPair]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    chosen, rejected = score_padded(model, rows).split(len(pairs))
    return chosen, rejected


def _metrics(margins: torch.Tensor) -> dict[str, float]:
    losses = bradley_terry_losses(margins, torch.zeros_like(margins))
    return {
        "loss": losses.mean().item(),
        "pair_accuracy": (margins > 0).float().mean().item(),  # a tie counts as wrong
        "reward_margin": margins.mean().item(),
    }


def _batches(pairs: Sequence[TokenPair], config: RewardModelRunConfig, epoch: int) -> Iterator[list[TokenPair]]:
    """Yield all pairs once, shuffled by seed and epoch; the last batch may be smaller."""
    order = list(range(len(pairs)))
    random.Random(f"{config.rm.seed}/{epoch}").shuffle(order)
    size = config.policy.train_global_batch_size
    for start in range(0, len(order), size):
        yield [pairs[index] for index in order[start : start + size]]
