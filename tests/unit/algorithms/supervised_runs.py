"""Supervised runs of a tiny model in a directory of their own, stopped where a test wants it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.supervised_loop import Objective, SupervisedRun, train_supervised
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.shared_sections import CheckpointingConfig
from nemo_rl.config.supervised_runs import SupervisedRunConfig
from nemo_rl.data.supervised_samples import SampleLoader, SupervisedDataset, TokenizedExample
from nemo_rl.observability.console import Progress
from nemo_rl.observability.loggers import JsonlLogger
from nemo_rl.policy.driver import LocalPolicy


class StopsAfter(Progress):
    """Asks for a stop once so many steps are done, as Ctrl-C does."""

    def __init__(self, interrupt: Interrupt, stop_after: int | None) -> None:
        super().__init__()
        self._interrupt, self._stop_after = interrupt, stop_after

    def step(self, step: int, **shown: Any) -> None:
        super().step(step, **shown)
        if step == self._stop_after:
            self._interrupt.request()


def make_policy(config: SupervisedRunConfig) -> LocalPolicy:
    """Return the policy of a configuration, whose model is a directory."""
    return LocalPolicy(
        config.policy, model_path=config.policy.model_name, temperature=1.0, needs_reference=config.needs_reference,
        num_samples_per_step=4, seed=0, tokenizer=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Runs:
    """Trains on ten samples, four a step, for two epochs."""

    directory: Path
    make_config: Callable[..., SupervisedRunConfig]  # called with keys of the algorithm's section
    make_objective: Callable[[Any], Objective]  # called with the configuration
    samples: Sequence[TokenizedExample]
    other: Sequence[TokenizedExample]  # of the validation set "other", beside "held", which has all samples

    def train(
        self, *, stop_after: int | None = None, store: str = "checkpoints", **keys: Any
    ) -> tuple[TrainingProgress, Any]:
        """Return where the run ended, and the weights that it has then."""
        return asyncio.run(self._train(self.make_config(**keys), stop_after, store))

    async def _train(
        self, config: SupervisedRunConfig, stop_after: int | None, store: str
    ) -> tuple[TrainingProgress, Any]:
        policy = make_policy(config)
        interrupt = Interrupt()
        run = SupervisedRun(
            config=config,
            objective=self.make_objective(config),
            run_dir=self.directory,
            num_steps=5,
            source=SampleLoader(self.samples, shuffle=True, seed=config.algorithm.seed, max_epochs=2),
            validation=(SupervisedDataset("held", self.samples), SupervisedDataset("other", self.other)),
            policy=policy,
            checkpoints=CheckpointStore(CheckpointingConfig(enabled=True, save_period=100), self.directory / store),
            logger=JsonlLogger(self.directory),
            progress=StopsAfter(interrupt, stop_after),
            interrupt=interrupt,
        )
        try:
            training = await train_supervised(run)
            weights = await policy.run_with_weights(lambda weights: {name: each.clone() for name, each in weights})
        finally:
            await policy.close()
            run.logger.close()
        return training, weights
