"""Training of a reward model on preferences (Bradley and Terry): the better answer learns the higher score.

One process. Made by launch/reward_model_training.py; computes scores as environments/scorers does.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.config.supervised_runs import RewardModelRunConfig
from nemo_rl.environments.scorers.classifier import score_padded
from nemo_rl.policy.optimizers import make_optimizer, make_scheduler


@dataclass(frozen=True, slots=True)
class TokenPair:
    """Two whole conversations as token ids."""

    chosen: Sequence[int]
    rejected: Sequence[int]
    is_masked: bool = False  # too long: it keeps its place in a batch, with no weight in the loss


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    metrics: dict[str, float]
    seconds: float


def bradley_terry_losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return `-log sigmoid(chosen - rejected)` of each pair, its negative log-likelihood: [N] from scores [N].

    Example: scores 2 and 0 give 0.127, equal scores 0.693.
    """
    return -nn.functional.logsigmoid(chosen - rejected)


class RewardModelTrainer:
    """A model with its optimizer and schedule; weights are float32, and `policy.precision` is that of computation."""

    def __init__(self, model: PreTrainedModel, config: RewardModelRunConfig) -> None:
        self._model, self._config = model, config
        self._optimizer = make_optimizer(config.policy, model.parameters())
        self._scheduler = make_scheduler(config.policy, self._optimizer)

    def train_steps(self, pairs: Sequence[TokenPair]) -> Iterator[StepResult]:
        """Train, and yield the result of each step, until `max_num_epochs` or `max_num_steps` is reached."""
        config = self._config
        epochs = (batch for epoch in range(config.rm.max_num_epochs) for batch in _batches(pairs, config, epoch))
        for step, batch in zip(range(1, config.rm.max_num_steps + 1), epochs, strict=False):
            started_at = time.perf_counter()
            metrics = self.train_step(batch)
            yield StepResult(step, metrics, time.perf_counter() - started_at)

    def train_step(self, batch: Sequence[TokenPair]) -> dict[str, float]:
        """Run one optimizer step on the mean loss of the batch; return metrics without a prefix.

        A batch of masked pairs alone leaves the weights as they are.
        """
        batch = [pair for pair in batch if not pair.is_masked]
        if not batch:
            return {"num_valid_samples": 0.0, "lr": self._optimizer.param_groups[0]["lr"]}
        self._model.train()
        self._optimizer.zero_grad()
        size, lr = self._config.policy.train_micro_batch_size, self._optimizer.param_groups[0]["lr"]
        scores = []
        for start in range(0, len(batch), size):
            chosen, rejected = self._scores(batch[start : start + size])
            loss = bradley_terry_losses(chosen, rejected).sum() / len(batch)
            loss.backward()
            scores.append(torch.stack([chosen, rejected]).detach())
        limit = self._config.policy.max_grad_norm
        grad_norm = nn.utils.clip_grad_norm_(self._model.parameters(), math.inf if limit is None else limit)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return {**_metrics(torch.cat(scores, dim=1)), "grad_norm": grad_norm.item(), "lr": lr}

    @torch.inference_mode()
    def evaluate(self, pairs: Sequence[TokenPair]) -> dict[str, float]:
        """Return loss, accuracy, margin and rewards over the first `rm.val_batches` batches, without a prefix."""
        self._model.eval()
        section = self._config.rm
        if section.val_batches is not None:
            pairs = pairs[: section.val_batches * section.val_global_batch_size]
        size, scores = section.val_micro_batch_size or self._config.policy.train_micro_batch_size, []
        for start in range(0, len(pairs), size):
            scores.append(torch.stack(self._scores(pairs[start : start + size])))
        return _metrics(torch.cat(scores, dim=1))

    def _scores(self, pairs: Sequence[TokenPair]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        is_half = self._config.policy.precision == "bfloat16"
        with torch.autocast(self._model.device.type, dtype=torch.bfloat16, enabled=is_half):
            chosen, rejected = score_padded(self._model, rows).float().split(len(pairs))
        return chosen, rejected


def num_steps(num_pairs: int, config: RewardModelRunConfig) -> int:
    """Return the number of steps that `train_steps` makes."""
    num_data_steps = config.rm.max_num_epochs * -(-num_pairs // config.policy.train_global_batch_size)
    return min(config.rm.max_num_steps, num_data_steps)


def _metrics(scores: torch.Tensor) -> dict[str, float]:
    """Return the metrics of scores [2, N] of the chosen and the rejected answers."""
    chosen, rejected = scores
    accuracy = (chosen > rejected).float().mean().item()  # a tie counts as wrong
    return {
        "loss": bradley_terry_losses(chosen, rejected).mean().item(),
        "accuracy": accuracy,
        "pair_accuracy": accuracy,
        "reward_margin": (chosen - rejected).mean().item(),
        "rewards_chosen_mean": chosen.mean().item(),
        "rewards_rejected_mean": rejected.mean().item(),
        "num_valid_samples": float(len(chosen)),
    }


def _batches(pairs: Sequence[TokenPair], config: RewardModelRunConfig, epoch: int) -> Iterator[list[TokenPair]]:
    """Yield all pairs once, with `data.shuffle` in an order of seed and epoch; the last batch may be smaller."""
    order = list(range(len(pairs)))
    if config.data.shuffle:
        random.Random(f"{config.rm.seed}/{epoch}").shuffle(order)
    size = config.policy.train_global_batch_size
    for start in range(0, len(order), size):
        yield [pairs[index] for index in order[start : start + size]]
