"""The loss against hand computation, and against divergences of whole distributions computed another way."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.loss_types import Normalizer, TokenScores
from nemo_rl.losses.distillation_section import DistillationLossConfig
from nemo_rl.losses.divergences import TopKDivergence
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import count_valid
from tests.unit.algorithms.batches import make_batch, normalizer_of
from tests.unit.policy import tiny

P, Q = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
VOCABULARY, K = 11, 4


def two_tokens(p: list[float], ids: list[int] | None = None) -> TensorDict:
    """A prompt token and a sampled one, of which a teacher said `p`."""
    batch = make_batch([[0, 1]])
    batch[keys.TEACHER_TOPK_IDS] = torch.tensor(ids or list(range(len(p)))).expand(1, 2, len(p)).clone()
    batch[keys.TEACHER_TOPK_LOGPROBS] = torch.tensor(p).log().expand(1, 2, len(p)).clone()
    return batch


def student(q: list[float], entropy: float | None = None) -> TokenScores:
    return TokenScores(
        torch.zeros(1, 2),
        torch.tensor(q).log().expand(1, 2, len(q)).clone(),
        None if entropy is None else torch.full((1, 2), entropy),
    )


def loss_of(scores: TokenScores, batch: TensorDict, **options: Any) -> tuple[float, dict[str, float]]:
    loss, metrics = TopKDivergence(DistillationLossConfig(**options))(scores, batch, normalizer_of(batch))
    return float(loss), {name: float(metric.value) for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kl_type": "forward"}, 0.09927),
        ({"kl_type": "reverse"}, 0.11662),
        ({"kl_type": "mixed", "mixed_kl_weight": 0.25}, 0.25 * 0.09927 + 0.75 * 0.11662),
    ],
)
def test_worked_values(options: dict[str, Any], expected: float) -> None:
    loss, metrics = loss_of(student(Q), two_tokens(P), **options)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert metrics["forward_kl"] == pytest.approx(0.09927, abs=1e-5)
    assert metrics["reverse_kl"] == pytest.approx(0.11662, abs=1e-5)


def test_both_sides_are_renormalised_over_the_tokens_compared() -> None:
    """Half the mass of each lies elsewhere: the divergences are those of the worked values."""
    halved, half = two_tokens([x / 2 for x in P]), student([x / 2 for x in Q])
    loss, metrics = loss_of(half, halved, kl_type="forward")
    assert loss == pytest.approx(0.09927, abs=1e-5)
    assert metrics["teacher_topk_mass"] == pytest.approx(0.5)
    assert metrics["student_topk_mass"] == pytest.approx(0.5)


def test_what_the_teacher_rules_out_costs_a_hundred_nats_by_the_students_mass_there() -> None:
    """q = (.4, .2, .4): two tokens compared, p = (.5, .5) over them, and the third ruled out.

    reverse = .4 log(.4 / .5) + .2 log(.2 / .5) + .4 (log .4 + 100).
    """
    entropy = -(2 * 0.4 * torch.tensor(0.4).log() + 0.2 * torch.tensor(0.2).log())
    scores = student([0.4, 0.2], float(entropy))
    batch = two_tokens([0.3, 0.3])
    loss, _ = loss_of(scores, batch, kl_type="reverse", zero_outside_topk=True)
    assert loss == pytest.approx(-0.08926 - 0.18326 + 40 - 0.36652, abs=1e-4)
    mixed, _ = loss_of(scores, batch, kl_type="mixed", mixed_kl_weight=0.75, zero_outside_topk=True)
    forward = 0.5 * 0.22314 + 0.5 * 0.91629
    assert mixed == pytest.approx(0.75 * forward + 0.25 * loss, abs=1e-4)


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(3, 5, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def scored(logits: torch.Tensor, batch: TensorDict, loss: TopKDivergence) -> TokenScores:
    """What a model with these logits would answer."""
    everything = logits.log_softmax(-1)
    candidates = everything.gather(-1, batch[keys.TEACHER_TOPK_IDS].clamp(min=0))
    entropy = -(everything.exp() * everything).sum(-1) if loss.required_scores.entropy else None
    return TokenScores(everything[..., 0], candidates, entropy)


def taught(teacher: torch.Tensor, k: int) -> TensorDict:
    batch = make_batch([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0]], sample_mask=[1.0, 1.0, 0.0])
    logprobs, ids = teacher.log_softmax(-1).topk(k, dim=-1)
    batch[keys.TEACHER_TOPK_IDS], batch[keys.TEACHER_TOPK_LOGPROBS] = ids, logprobs
    return batch


def whole_divergence(log_p: torch.Tensor, log_q: torch.Tensor, kl_type: str, batch: TensorDict) -> torch.Tensor:
    """Of whole distributions [B, T, V], by torch's own function, over the valid tokens."""
    forward = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    reverse = torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
    each = {"forward": forward, "reverse": reverse, "mixed": 0.3 * forward + 0.7 * reverse}[kl_type]
    mask = batch[keys.TOKEN_MASK] * batch[keys.SAMPLE_MASK][:, None]
    return (each * mask).sum() / mask.sum()


@pytest.mark.parametrize("zero_outside_topk", [False, True])
@pytest.mark.parametrize("kl_type", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("k", [K, VOCABULARY])
def test_value_and_gradient_are_those_of_whole_distributions(k: int, kl_type: str, zero_outside_topk: bool) -> None:
    """At k = V these are the divergences themselves; below it the teacher's others have e^-100, or nobody has any."""
    teacher, batch = random_logits(1), taught(random_logits(1), k)
    own = random_logits(2).double().requires_grad_()
    options = {"kl_type": kl_type, "mixed_kl_weight": 0.3, "zero_outside_topk": zero_outside_topk}
    loss_fn = TopKDivergence(DistillationLossConfig.model_validate(options), is_on_policy=False)
    loss, _ = loss_fn(scored(own, batch, loss_fn), batch, normalizer_of(batch))
    (gradient,) = torch.autograd.grad(loss, own)

    compared = torch.zeros(3, 5, VOCABULARY, dtype=torch.bool).scatter(-1, batch[keys.TEACHER_TOPK_IDS], True)
    masked = teacher.double().masked_fill(~compared, -torch.inf)
    log_p = masked.log_softmax(-1).masked_fill(~compared, -100.0)
    log_q = own.log_softmax(-1) if zero_outside_topk else own.masked_fill(~compared, -1e4).log_softmax(-1)
    expected = whole_divergence(log_p, log_q, kl_type, batch)
    (expected_gradient,) = torch.autograd.grad(expected, own)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_tokens_that_are_none_are_compared_by_nobody() -> None:
    with_none = two_tokens([0.7, 0.2, 0.1, 0.5], ids=[0, 1, 2, -1])
    scores = student([*Q, 1.0])
    for kl_type, expected in (("forward", 0.09927), ("reverse", 0.11662)):
        loss, metrics = loss_of(scores, with_none, kl_type=kl_type)
        assert loss == pytest.approx(expected, abs=1e-5)
        assert metrics["teacher_topk_mass"] == metrics["student_topk_mass"] == pytest.approx(1.0)


def test_a_teacher_sure_of_itself_gives_no_nan() -> None:
    batch = two_tokens([1.0, 0.0, 0.0])
    scores = student(Q)
    scores.candidates.requires_grad_()  # type: ignore[union-attr]
    for zero_outside in (False, True):
        own = scores._replace(entropy=torch.ones(1, 2)) if zero_outside else scores
        loss, _ = TopKDivergence(DistillationLossConfig(zero_outside_topk=zero_outside))(
            own, batch, normalizer_of(batch)
        )
        loss.backward()
        assert loss.isfinite()
        assert scores.candidates.grad.isfinite().all()  # type: ignore[union-attr]


def test_losses_of_parts_add_up_to_the_whole() -> None:
    batch, own = taught(random_logits(1), K), random_logits(2)
    loss_fn = TopKDivergence(DistillationLossConfig())
    normalizer = normalizer_of(batch)
    whole, metrics = loss_fn(scored(own, batch, loss_fn), batch, normalizer)
    parts = [loss_fn(scored(own[i : i + 1], batch[i : i + 1], loss_fn), batch[i : i + 1], normalizer) for i in range(3)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    assert float(sum(m["forward_kl"].value for _, m in parts)) == pytest.approx(float(metrics["forward_kl"].value))


def test_entropy_is_asked_for_only_where_other_tokens_count() -> None:
    needed = {
        (kl_type, zero): TopKDivergence(
            DistillationLossConfig.model_validate({"kl_type": kl_type, "zero_outside_topk": zero})
        )
        for kl_type in ("forward", "reverse", "mixed")
        for zero in (False, True)
    }
    asking = {key for key, loss in needed.items() if loss.required_scores.entropy}
    assert asking == {("forward", True), ("reverse", True), ("mixed", True)}  # forward: for the metric reverse_kl


def test_samples_are_compared_with_the_engines_log_probs_where_it_sampled_them() -> None:
    batch = two_tokens(P)
    batch[keys.GENERATION_LOGPROBS] = torch.tensor([[0.0, -0.5]])
    _, metrics = loss_of(student(Q), batch)
    assert metrics["max_logprob_error"] == pytest.approx(0.5)
    recorded = TopKDivergence(DistillationLossConfig(), is_on_policy=False)
    _, without = recorded(student(Q), batch, normalizer_of(batch))
    assert "max_logprob_error" not in without
    assert keys.GENERATION_LOGPROBS not in recorded.required_keys


@pytest.mark.parametrize("options", [{}, {"zero_outside_topk": True}], ids=["renormalised", "zero outside"])
def test_gradients_of_a_model_are_those_of_its_whole_logits(options: dict[str, Any]) -> None:
    """Through the chunks of the output head, at k = V."""
    torch.manual_seed(0)
    model, teacher = tiny.MODELS["qwen2"](), tiny.MODELS["llama"]()
    batch = tiny.make_batch([7, 12, 4])
    with torch.no_grad():
        logits = teacher(input_ids=batch["token_ids"], use_cache=False).logits
    before = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1).log_softmax(-1)  # entry t is of token t
    logprobs, ids = before.topk(tiny.VOCABULARY, dim=-1)
    batch[keys.TEACHER_TOPK_IDS], batch[keys.TEACHER_TOPK_LOGPROBS] = ids, logprobs
    loss_fn = TopKDivergence(
        DistillationLossConfig.model_validate({"mixed_kl_weight": 0.3, **options}), is_on_policy=False
    )
    module = CausalLogprobs(model, temperature=1.0, chunk_size=3)
    scores = module(batch["token_ids"], batch["token_mask"] > 0, loss_fn.required_scores, ids)
    normalizer: Normalizer = count_valid(batch, torch.arange(3))
    loss, _ = loss_fn(scores, batch, normalizer)
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    own = model(input_ids=batch["token_ids"], use_cache=False).logits
    log_q = torch.cat([torch.zeros_like(own[:, :1]), own[:, :-1]], 1).log_softmax(-1)
    expected = whole_divergence(before, log_q, "mixed", batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    for gradient, other in zip(gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-4)
