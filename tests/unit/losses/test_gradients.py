import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl.config.registries import LOSSES
from nemo_rl.interfaces import Normalizer, TokenScores
from nemo_rl.losses.make import make_loss
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
@pytest.mark.parametrize("split", [(1, 1, 1, 1, 1, 1), (4, 2), (1, 5)])
def test_any_split_into_micro_batches_adds_up(options: dict[str, Any], split: tuple[int, ...]) -> None:
    batch, current = random_batch(3)
    normalizer = normalizer_of(batch)
    loss, gradient, metrics = evaluate(batch, current.tolist(), **options)
    parts = [
        evaluate(micro_batch, logprobs.tolist(), normalizer, **options)
        for micro_batch, logprobs in zip(batch.split(list(split)), current.split(list(split)), strict=True)
    ]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    for name, value in metrics.items():
        reduce = min if name.endswith("_min") else max if name.endswith("_max") or name.startswith("max_") else sum
        assert reduce(part[2][name] for part in parts) == pytest.approx(value, abs=1e-5), name


@every_option
def test_nothing_under_the_mask_reaches_loss_gradient_or_metrics(options: dict[str, Any]) -> None:
    batch, current = random_batch(4)
    clean = evaluate(batch, current.tolist(), **options)
    masked = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    spoilt = batch.clone()
    for name, rubbish in (
        ("prev_logprobs", math.nan),
        ("generation_logprobs", -math.inf),
        ("reference_logprobs", 1e30),
        ("advantages", math.nan),
    ):
        spoilt[name] = batch[name].masked_fill(masked, rubbish)
    dirty = evaluate(spoilt, current.masked_fill(masked, -1e30).tolist(), **options)
    assert dirty[0] == clean[0]
    assert torch.equal(dirty[1], clean[1])
    assert dirty[2] == clean[2]


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


@every_option
def test_a_micro_batch_without_a_valid_token_is_zero(options: dict[str, Any]) -> None:
    batch, current = random_batch(6)
    batch["sample_mask"] = torch.zeros(6)
    loss, gradient, _ = evaluate(batch, current.tolist(), Normalizer(0.0, 0.0), **options)
    assert loss == 0
    assert not gradient.any()
