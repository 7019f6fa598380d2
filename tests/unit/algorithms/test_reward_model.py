import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from nemo_rl.algorithms.reward_model import (
    RewardModelTrainer,
    TokenPair,
    bradley_terry_losses,
    num_steps,
)
from nemo_rl.config.supervised_runs import RewardModelRunConfig

PAIRS = [TokenPair([1 + n % 5, 2, 3][: 1 + n % 3], [7, 8 + n % 3]) for n in range(7)]


def config(**policy: Any) -> RewardModelRunConfig:
    return RewardModelRunConfig.model_validate(
        {
            "rm": {"max_num_epochs": 2, "max_num_steps": 3},
            "policy": {"model_name": "m", "train_global_batch_size": 4, "train_micro_batch_size": 4, **policy},
            "data": {"train": {"dataset_name": "spell_backward"}},
        }
    )


def model() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_labels": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=12, pad_token_id=0, **sizes)).float()


def trainer(learning_rate: float, *, optimizer: str = "SGD", schedule: float | None = None, **policy: Any) -> Any:
    """Return the trainer of a fresh model and that model."""
    kwargs = {"lr": learning_rate}
    options: dict[str, Any] = {"optimizer": {"name": f"torch.optim.{optimizer}", "kwargs": kwargs}, **policy}
    if schedule is not None:
        options["scheduler"] = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": schedule}}
    return RewardModelTrainer(model(), config(**options))


def stepped(size: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    made = trainer(1.0, train_micro_batch_size=size)
    metrics = made.train_step(PAIRS[:4])
    return metrics, [parameter.detach() for parameter in made._model.parameters()]


def test_the_loss_is_the_negative_log_likelihood_of_the_choice() -> None:
    losses = bradley_terry_losses(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 1.0]))
    expected = [math.log(1 + math.exp(-2)), math.log(2), math.log(1 + math.exp(2))]
    assert losses.tolist() == pytest.approx(expected)


def test_micro_batches_change_no_step() -> None:
    (whole, expected), (split, found) = stepped(4), stepped(1)
    assert split == pytest.approx(whole, rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_masked_pair_has_no_weight_and_a_batch_of_them_changes_nothing() -> None:
    masked, plain = TokenPair((), (), is_masked=True), trainer(1.0)
    beside = trainer(1.0)
    assert beside.train_step([PAIRS[0], masked, PAIRS[1]]) == plain.train_step(PAIRS[:2])
    for one, other in zip(beside._model.parameters(), plain._model.parameters(), strict=True):
        assert torch.equal(one, other)
    before = [parameter.clone() for parameter in beside._model.parameters()]
    assert beside.train_step([masked]) == {"num_valid_samples": 0.0, "lr": 1.0}
    assert all(torch.equal(one, other) for one, other in zip(before, beside._model.parameters(), strict=True))


def test_training_ranks_the_pairs_and_measures_it() -> None:
    made = trainer(0.02, optimizer="AdamW")
    before = made.evaluate(PAIRS)
    for _ in range(10):
        made.train_step(PAIRS)
    after = made.evaluate(PAIRS)
    assert after["pair_accuracy"] == after["accuracy"] == 1.0
    assert after["loss"] < before["loss"]
    assert after["reward_margin"] == pytest.approx(after["rewards_chosen_mean"] - after["rewards_rejected_mean"])
    assert after["reward_margin"] > 0
    assert after["num_valid_samples"] == 7


def test_a_tie_is_not_ranked_right() -> None:
    assert trainer(0.0).evaluate([TokenPair([1, 2], [1, 2])])["pair_accuracy"] == 0.0


def test_steps_end_with_the_epochs_or_the_limit_and_follow_the_seed() -> None:
    made = trainer(0.0)
    runs = [[r.metrics["loss"] for r in made.train_steps(PAIRS)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == num_steps(7, config()) == 3  # of 2 epochs x 2 batches
    assert num_steps(2, config()) == 2


def test_pairs_come_in_their_order_without_shuffling() -> None:
    made = RewardModelTrainer(
        model(), config().model_copy(update={"data": config().data.model_copy(update={"shuffle": False})})
    )
    first = next(iter(made.train_steps(PAIRS)))
    assert first.metrics["loss"] == pytest.approx(trainer(0.0).evaluate(PAIRS[:4])["loss"], rel=1e-5)


def test_the_schedule_lowers_the_learning_rate() -> None:
    rates = [result.metrics["lr"] for result in trainer(1e-3, schedule=0.5).train_steps(PAIRS)]
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4])


def test_validation_is_of_the_first_batches() -> None:
    section = config().rm.model_copy(update={"val_batches": 2, "val_global_batch_size": 2})
    few = RewardModelTrainer(model(), config().model_copy(update={"rm": section})).evaluate(PAIRS)
    assert few == pytest.approx(trainer(0.0).evaluate(PAIRS[:4]))
    assert few["num_valid_samples"] == 4


def test_bfloat16_computes_near_float32_and_keeps_float32_weights() -> None:
    made = trainer(1e-3, precision="bfloat16")
    exact = trainer(1e-3).train_step(PAIRS[:4])
    metrics = made.train_step(PAIRS[:4])
    assert metrics["loss"] == pytest.approx(exact["loss"], abs=2e-2)
    assert metrics["loss"] != exact["loss"]
    assert {parameter.dtype for parameter in made._model.parameters()} == {torch.float32}
