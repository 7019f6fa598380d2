import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.registries import LOSSES
from nemo_rl.loss_types import TokenScores
from nemo_rl.losses.make import make_loss
from nemo_rl.testing import check_loss
from tests.unit.algorithms.batches import make_batch, normalizer_of
from tests.unit.losses.evaluation import (
    EVERY_OPTION,
    evaluate,
    every_option,
    random_batch,
)


def written_loss(current: torch.Tensor, prev: torch.Tensor, batch: TensorDict, mask: torch.Tensor) -> torch.Tensor:
    """The plain loss as the documentation writes it, a token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for b, t in mask.nonzero().tolist():
        advantage = batch["advantages"][b, t].double()
        ratio = torch.exp(current[b, t] - prev[b, t])
        total = total + torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        d = batch["reference_logprobs"][b, t].double() - current[b, t]
        weight = torch.exp(current[b, t] - current[b, t].detach())
        total = total + 0.1 * weight * (torch.exp(d) - 1 - d)
    return total / mask.sum()


def test_gradient_is_that_of_the_written_formula() -> None:
    batch, current = random_batch(1)
    _, gradient, _ = evaluate(batch, current.tolist(), reference_policy_kl_penalty=0.1)
    reference = current.double().requires_grad_()
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    written_loss(reference, batch["prev_logprobs"].double(), batch, mask).backward()
    assert reference.grad is not None
    torch.testing.assert_close(gradient, reference.grad.float())


@pytest.mark.parametrize("name", ["ppo", "sequence level", "dual clip", "gspo", "reinforce", "tis", "vapo"])
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    batch, current = random_batch(2)
    loss_fn = make_loss(LOSSES.read(EVERY_OPTION[name]))
    _, gradient, _ = evaluate(batch, current.tolist(), **EVERY_OPTION[name])
    step = 2e-3
    for b, t in (batch["token_mask"] > 0).nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = current.clone()
            moved[b, t] += sign * step
            ends.append(float(loss_fn(TokenScores(moved), batch, normalizer_of(batch))[0]))
        assert gradient[b, t] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-3)


@every_option
@pytest.mark.parametrize("masked_value", [math.nan, -math.inf, 1e30])
def test_contract_of_losses_holds_for_every_option(options: dict[str, Any], masked_value: float) -> None:
    check_loss(options.get("type", "ppo"), masked_value=masked_value, **options)


@pytest.mark.parametrize("name", LOSSES.names)
def test_contract_of_losses_holds_for_every_loss(name: str) -> None:
    """clip_cov and kl_cov choose tokens by their covariance in the micro-batch."""
    check_loss(name, adds_up=name not in ("clip_cov", "kl_cov"))


@every_option
def test_names_of_extremes_say_how_they_are_reduced(options: dict[str, Any]) -> None:
    batch, current = random_batch(3)
    _, metrics = make_loss(LOSSES.read(options))(TokenScores(current), batch, normalizer_of(batch))
    for name, metric in metrics.items():
        is_max = name.endswith("_max") or name.startswith("max_")
        assert (metric.reduction == "min") == name.endswith("_min"), name
        assert (metric.reduction == "max") == is_max, name


@every_option
def test_a_token_the_engine_gave_no_chance_poisons_nothing(options: dict[str, Any]) -> None:
    batch, current = random_batch(5)
    batch["generation_logprobs"][2, 3] = -math.inf
    loss, gradient, metrics = evaluate(batch, current.tolist(), **options)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["num_nonfinite_generation_logprobs"] == 1
    assert metrics["max_logprob_error"] < 2


def test_a_ratio_beyond_float32_leaves_the_gradient_finite() -> None:
    batch = make_batch([[0, 1, 1]], advantages=[[0.0, 1.0, 0.0]], prev_logprobs=[[0.0, -500.0, -500.0]])
    loss, gradient, _ = evaluate(batch, [[0.0, -1.0, -1.0]])
    assert loss == pytest.approx(-1.2 / 2)
    assert gradient.isfinite().all()


def test_the_first_token_carries_no_loss() -> None:
    batch = make_batch([[1, 1]], advantages=[[1.0, 1.0]])
    assert evaluate(batch, [[-1.0, -1.0]])[1].tolist() == [[0.0, -1.0]]
