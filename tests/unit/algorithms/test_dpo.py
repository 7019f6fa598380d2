"""DPO: preferred answers win, metrics have meanings, and a resumed run equals an uninterrupted one."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.dpo import DPOObjective
from nemo_rl.algorithms.loop import TrainingProgress
from nemo_rl.algorithms.run import Interrupt
from nemo_rl.algorithms.supervised import SupervisedRun, train_supervised
from nemo_rl.checkpoint import CheckpointStore
from nemo_rl.config.run import CheckpointingConfig
from nemo_rl.config.supervised import DPORunConfig
from nemo_rl.data.supervised import PairSample, SampleLoader, SupervisedDataset, SupervisedSample
from nemo_rl.metric_names import find_undocumented
from nemo_rl.observability.loggers import JsonlLogger
from nemo_rl.policy.driver import LocalPolicy
from tests.contracts.policies import SETTINGS
from tests.unit.algorithms.test_sft import StopsAfter
from tests.unit.policy.tiny import VOCABULARY, saved_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("qwen2", tmp_path_factory.mktemp("models"))


def pairs(count: int, *, seed: int = 0) -> list[PairSample]:
    """Pairs whose chosen answers are tokens of the first half of the vocabulary, rejected ones of the second."""
    draws = np.random.default_rng(seed)

    def side(low: int, high: int) -> SupervisedSample:
        length = int(draws.integers(5, 10))
        return SupervisedSample(draws.integers(low, high, length).astype(np.int32), np.arange(length) >= 3)

    half = VOCABULARY // 2
    return [PairSample(side(3, half), side(half, VOCABULARY)) for _ in range(count)]


class Runs:
    """Trains a tiny model on ten pairs, four a step, in a directory of its own."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model, self.directory = model, directory

    def config(self, **dpo: Any) -> DPORunConfig:
        return DPORunConfig.model_validate(
            {
                "dpo": {
                    "max_num_epochs": 2,
                    "val_period": 2,
                    "val_global_batch_size": 3,
                    "sft_loss_weight": 0.1,
                    **dpo,
                },
                "policy": {"model_name": str(self.model), **SETTINGS, "train_global_batch_size": 4},
                "data": {"train": {}},
            }
        )

    def train(self, *, stop_after: int | None = None, store: str = "checkpoints", **dpo: Any) -> Any:
        return asyncio.run(self._train(self.config(**dpo), stop_after, store))

    async def _train(self, config: DPORunConfig, stop_after: int | None, store: str) -> tuple[TrainingProgress, Any]:
        policy = LocalPolicy(
            config.policy, model_path=str(self.model), temperature=1.0, needs_reference=True,
            num_samples_per_step=4, seed=0, tokenizer=None,
        )  # fmt: skip
        interrupt = Interrupt()
        run = SupervisedRun(
            config=config,
            objective=DPOObjective(config.dpo),
            run_dir=self.directory,
            num_steps=5,
            source=SampleLoader(pairs(10), shuffle=True, seed=config.dpo.seed, max_epochs=2),
            validation=(SupervisedDataset("held", pairs(10)), SupervisedDataset("other", pairs(4, seed=1))),
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


@pytest.fixture
def runs(model: Path, tmp_path: Path) -> Runs:
    return Runs(model, tmp_path)


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(runs: Runs) -> None:
    """The reference is the model before training, also after a checkpoint is loaded."""
    whole, weights = runs.train(store="whole")
    stopped, _ = runs.train(stop_after=2)
    assert (stopped.position.step, stopped.interrupted) == (2, True)
    resumed, weights_after = runs.train()
    assert resumed.position.step == 5
    assert resumed.validations[5] == whole.validations[5]
    assert all(torch.equal(weights[name], weights_after[name]) for name in weights)


def test_preferred_answers_win_and_every_metric_has_a_meaning(runs: Runs) -> None:
    training, _ = runs.train(val_at_start=True)
    before, after = training.validations[0], training.validations[5]
    assert before["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert before["accuracy"] == before["rewards_chosen_mean"] == 0
    assert after["accuracy"] > 0.9
    assert after["preference_loss"] < before["preference_loss"]
    assert after["rewards_chosen_mean"] > after["rewards_rejected_mean"]
    assert after["loss"] == pytest.approx(after["preference_loss"] + 0.1 * after["sft_loss"])
    assert after["loss"] == pytest.approx((after["held/loss"] + after["other/loss"]) / 2)
    rows = [json.loads(line) for line in (runs.directory / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step", "time"}
    assert find_undocumented(names) == []
    trained = {"loss", "preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean"}
    trained |= {"num_valid_samples", "global_valid_seqs", "global_valid_toks", "grad_norm", "lr"}
    assert {f"train/{name}" for name in trained} <= names
    steps = [row for row in rows if "train/loss" in row]
    assert [row["train/num_valid_samples"] for row in steps] == [4.0] * 5
    assert [row["train/global_valid_seqs"] for row in steps] == [8.0] * 5
