"""Supervised training: its loss by hand, its steps and validations, and a resumed run against an uninterrupted one."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.algorithms.interrupt import Interrupt
from nemo_rl.algorithms.supervised_loop import validate
from nemo_rl.algorithms.supervised_objectives import SFTObjective
from nemo_rl.config.supervised_runs import SFTRunConfig
from nemo_rl.data.supervised_samples import SupervisedDataset, SupervisedSample, make_supervised_batch
from nemo_rl.loss_types import Normalizer, TokenScores
from nemo_rl.losses.likelihood import NegativeLogLikelihood
from tests.contracts.policies import SETTINGS
from tests.support.metric_names import find_undocumented
from tests.unit.algorithms.supervised_runs import Runs, make_policy
from tests.unit.policy.tiny import VOCABULARY, saved_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("qwen2", tmp_path_factory.mktemp("models"))


def samples(count: int, *, seed: int = 0) -> list[SupervisedSample]:
    draws = np.random.default_rng(seed)
    lengths = draws.integers(4, 12, count)
    return [
        SupervisedSample(draws.integers(3, VOCABULARY, length).astype(np.int32), np.arange(length) >= 2)
        for length in lengths
    ]


def test_loss_is_the_mean_over_all_learnt_tokens() -> None:
    batch = make_supervised_batch([SupervisedSample(np.zeros(4, dtype=np.int32), np.array([False, True, True, False]))])
    scores = TokenScores(torch.tensor([[0.0, -1.0, -2.0, -4.0]]))
    loss, _ = NegativeLogLikelihood()(scores, batch, Normalizer(num_valid_tokens=2, num_valid_trajectories=1))
    assert loss.item() == 1.5


def test_a_step_of_one_learnt_token_is_divided_by_one() -> None:
    batch = make_supervised_batch([SupervisedSample(np.zeros(2, dtype=np.int32), np.array([False, True]))])
    loss, _ = NegativeLogLikelihood()(TokenScores(torch.tensor([[0.0, -3.0]])), batch, Normalizer(1, 1))
    assert loss.item() == 3.0


def make_config(model: Path, **sft: Any) -> SFTRunConfig:
    return SFTRunConfig.model_validate(
        {
            "sft": {"max_num_epochs": 2, "val_period": 2, "val_global_batch_size": 3, **sft},
            "policy": {"model_name": str(model), **SETTINGS, "train_global_batch_size": 4,
                       "scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 5}}},
            "data": {"train": {}},
        }
    )  # fmt: skip


@pytest.fixture
def runs(model: Path, tmp_path: Path) -> Runs:
    return Runs(tmp_path, partial(make_config, model), lambda config: SFTObjective(), samples(10), samples(2, seed=2))


def test_an_interrupted_run_saves_and_goes_on_as_if_it_had_not_been(runs: Runs) -> None:
    whole, weights = runs.train(store="whole")
    stopped, _ = runs.train(stop_after=2)
    assert (stopped.position.step, stopped.interrupted) == (2, True)
    resumed, weights_after = runs.train()
    assert (resumed.position.step, resumed.interrupted) == (5, False)
    assert resumed.position.source_state == whole.position.source_state
    assert resumed.position.source_state["consumed_prompts"] == 20
    assert resumed.validations[5] == whole.validations[5]
    assert all(torch.equal(weights[name], weights_after[name]) for name in weights)
    saved = [path.name for path in sorted((runs.directory / "checkpoints").iterdir())]
    assert saved == ["step_2", "step_5"]
    assert {path.name for path in (runs.directory / "checkpoints/step_5/policy").iterdir()} == {"weights", "optimizer"}


def test_loss_falls_and_every_metric_has_a_meaning(runs: Runs) -> None:
    training, _ = runs.train(val_at_start=True)
    assert sorted(training.validations) == [0, 2, 4, 5]
    rows = [json.loads(line) for line in (runs.directory / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step", "time"}
    assert find_undocumented(names) == []
    assert {"train/loss", "train/lr", "validation/loss", "validation/held/loss", "performance/tokens_per_sec"} <= names
    assert training.validations[5]["held/loss"] < training.validations[0]["held/loss"]  # of what is trained on
    assert training.validations[5]["loss"] == pytest.approx(
        (training.validations[5]["held/loss"] + training.validations[5]["other/loss"]) / 2
    )


@pytest.mark.parametrize(("val_batches", "num_samples"), [(None, 7), (2, 6)])
def test_validation_loss_is_over_all_tokens_of_the_first_batches(
    val_batches: int | None, num_samples: int, runs: Runs
) -> None:
    held = samples(7, seed=1)

    async def measured() -> tuple[float, float]:
        config = runs.make_config(val_batches=val_batches)
        policy = make_policy(config)
        run: Any = type("Run", (), {"config": config, "policy": policy, "interrupt": Interrupt(),
                                    "objective": SFTObjective(),
                                    "validation": (SupervisedDataset("held", held),)})  # fmt: skip
        batch = make_supervised_batch(held[:num_samples])
        try:
            logprobs = await policy.logprobs(batch)
            return (await validate(run))["loss"], float(-logprobs.sum() / batch["token_mask"].sum())
        finally:
            await policy.close()

    loss, expected = asyncio.run(measured())
    assert loss == pytest.approx(expected, abs=1e-6)
