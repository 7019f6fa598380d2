"""DPO: preferred answers win, metrics have meanings, and a resumed run equals an uninterrupted one."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.supervised_objectives import DPOObjective
from nemo_rl.config.supervised_runs import DPORunConfig
from nemo_rl.data.supervised_samples import PairSample, SupervisedSample
from tests.contracts.policies import SETTINGS
from tests.support.metric_names import find_undocumented
from tests.unit.algorithms.supervised_runs import Runs
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


def make_config(model: Path, **dpo: Any) -> DPORunConfig:
    return DPORunConfig.model_validate(
        {
            "dpo": {"max_num_epochs": 2, "val_period": 2, "val_global_batch_size": 3, "sft_loss_weight": 0.1, **dpo},
            "policy": {"model_name": str(model), **SETTINGS, "train_global_batch_size": 4},
            "data": {"train": {}},
        }
    )


def make_objective(config: DPORunConfig) -> DPOObjective:
    return DPOObjective(config.dpo)


@pytest.fixture
def runs(model: Path, tmp_path: Path) -> Runs:
    return Runs(tmp_path, partial(make_config, model), make_objective, pairs(10), pairs(4, seed=1))


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
