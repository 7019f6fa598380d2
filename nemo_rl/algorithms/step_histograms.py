"""Distributions of a training step, for the loggers that draw them: TensorBoard and W&B."""

import torch

from nemo_rl import batch as keys
from nemo_rl.algorithms.stages import StepBatch
from nemo_rl.algorithms.step_observers import StepObserver
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.interfaces import HistogramLogger
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.tracing import span
from nemo_rl.types import TrainingBatch

MAX_VALUES = 16_384  # per distribution; of more every n-th is taken


class HistogramObserver(StepObserver):
    """Logs the distributions of each step."""

    def __init__(self, logger: HistogramLogger, training: TrainingProgress) -> None:
        self._logger = logger
        self._training = training

    async def after_training(self, made: StepBatch, timer: StepTimer) -> None:
        """Log those of the batch that has been trained on."""
        step = self._training.position.step
        with span("histograms", step=step):
            for name, values in step_distributions(made.batch).items():
                self._logger.log_histogram(f"train/{name}/histogram", values.tolist(), step)


def step_distributions(batch: TrainingBatch) -> dict[str, torch.Tensor]:
    """Return distributions of a batch by name, at most MAX_VALUES each.

    `reward` (after shaping) and `gen_tokens` are per sample, `baseline_reward` per group (its mean reward);
    `advantages` and `sampling_importance_ratio`, exp(lp_prev - lp_gen), per trained token, if the batch has them.
    """
    sampled = (batch[keys.TOKEN_MASK] > 0) & (batch[keys.SAMPLE_MASK] > 0)[:, None]  # [B, T]
    found = {"gen_tokens": batch[keys.TOKEN_MASK].sum(-1)}
    if keys.REWARD in batch:
        reward, group = batch[keys.REWARD], batch[keys.GROUP_ID]
        _, member, count = group.unique(return_inverse=True, return_counts=True)
        means = torch.zeros(len(count)).index_add_(0, member, reward.float()) / count
        found |= {"reward": reward, "baseline_reward": means}
    if keys.ADVANTAGES in batch:
        found["advantages"] = batch[keys.ADVANTAGES][sampled]
    if keys.PREV_LOGPROBS in batch:
        found["sampling_importance_ratio"] = (batch[keys.PREV_LOGPROBS] - batch[keys.GENERATION_LOGPROBS])[
            sampled
        ].exp()
    return {name: values[:: -(-len(values) // MAX_VALUES) or 1] for name, values in found.items()}
