import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from nemo_rl.algorithms.reward_model import (
    TokenPair,
    bradley_terry_losses,
    evaluate,
    num_steps,
    train_step,
    train_steps,
)
from nemo_rl.config.supervised import RewardModelRunConfig

PAIRS = [TokenPair([1 + n % 5, 2, 3][: 1 + n % 3], [7, 8 + n % 3]) for n in range(7)]


def config(**policy: int) -> RewardModelRunConfig:
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


def stepped(size: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
    metrics = train_step(trained, optimizer, PAIRS[:4], config(train_micro_batch_size=size))
    return metrics, [parameter.detach() for parameter in trained.parameters()]


def test_the_loss_is_the_negative_log_likelihood_of_the_choice() -> None:
    losses = bradley_terry_losses(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 1.0]))
    expected = [math.log(1 + math.exp(-2)), math.log(2), math.log(1 + math.exp(2))]
    assert losses.tolist() == pytest.approx(expected)


def test_micro_batches_change_no_step() -> None:
    (whole, expected), (split, found) = stepped(4), stepped(1)
    assert split == pytest.approx(whole, rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_training_ranks_the_pairs_and_measures_it() -> None:
    trained, asked = model(), config()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.02)
    before = evaluate(trained, PAIRS, batch_size=3)
    for _ in range(10):
        train_step(trained, optimizer, PAIRS, asked)
    after = evaluate(trained, PAIRS, batch_size=3)
    assert after["pair_accuracy"] == 1.0
    assert after["loss"] < before["loss"]
    assert after["reward_margin"] > 0


def test_a_tie_is_not_ranked_right() -> None:
    tie = [TokenPair([1, 2], [1, 2])]
    assert evaluate(model(), tie, batch_size=1)["pair_accuracy"] == 0.0


def test_steps_end_with_the_epochs_or_the_limit_and_follow_the_seed() -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    runs = [[r.metrics["loss"] for r in train_steps(trained, optimizer, PAIRS, config())] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == num_steps(7, config()) == 3  # of 2 epochs x 2 batches
    assert num_steps(2, config()) == 2
