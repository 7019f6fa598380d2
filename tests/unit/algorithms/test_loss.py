import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.algorithms.loss import PolicyGradientLoss
from nemo_rl.config.loss import LossFn
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import Normalizer
from tests.unit.algorithms.batches import make_batch, normalizer_of

PREV = [0.0, -1.0, -1.0, -1.0]
CURRENT = [0.0, -1.69315, -1.0, -0.59453]  # ratios .5, 1, 1.5
GENERATION = [0.0, -0.5, -1.5, -0.8]


def three_tokens(**changes: Any) -> TensorDict:
    """One sequence: a prompt token, then three sampled ones."""
    values: dict[str, Any] = {
        "prev_logprobs": [PREV],
        "generation_logprobs": [GENERATION],
        "advantages": [[0.0, 1.0, -1.0, 2.0]],
        **changes,
    }
    return make_batch([[0, 1, 1, 1]], **values)


def evaluate(
    batch: TensorDict, logprobs: Any, normalizer: Normalizer | None = None, **options: Any
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient of the log-probs [B, T], metrics."""
    current = torch.tensor(logprobs, requires_grad=True)
    loss, metrics = PolicyGradientLoss(LossFn(**options))(current, batch, normalizer or normalizer_of(batch))
    loss.backward()
    assert current.grad is not None
    return float(loss.detach()), current.grad, {name: float(m.value) for name, m in metrics.items()}


def random_batch(seed: int = 0) -> tuple[TensorDict, torch.Tensor]:
    """Six samples of four trajectories, up to seven tokens, one of them without a gradient."""
    generator = torch.Generator().manual_seed(seed)

    def logprobs() -> torch.Tensor:
        return -torch.rand(6, 7, generator=generator) * 2 - 0.1

    mask = (torch.rand(6, 7, generator=generator) < 0.7).float()
    mask[:, 0] = 0
    mask[:, 3] = 1
    current = logprobs()
    batch = make_batch(
        mask.tolist(),
        trajectory_id=[0, 0, 1, 2, 2, 3],
        sample_mask=[1.0, 1.0, 1.0, 1.0, 1.0, 0.0],
        rewards=[1.0, 1.0, 0.0, 0.5, 0.5, -1.0],
        prev_logprobs=current + torch.randn(6, 7, generator=generator) * 0.3,
        reference_logprobs=logprobs(),
        generation_logprobs=current + torch.randn(6, 7, generator=generator) * 0.3,
        advantages=torch.randn(6, 7, generator=generator),
    )
    return batch, current


EVERY_OPTION: dict[str, dict[str, Any]] = {
    "ppo": {},
    "sequence level": {"token_level_loss": False},
    "dual clip": {"ratio_clip_c": 1.2},
    "gspo": {"token_level_loss": False, "sequence_level_importance_ratios": True},
    "gspo corrected": {
        "token_level_loss": False,
        "sequence_level_importance_ratios": True,
        "use_importance_sampling_correction": True,
    },
    "cispo": {"use_cispo": True},
    "reinforce": {"disable_ppo_ratio": True},
    "on policy": {"force_on_policy_ratio": True},
    "k1": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
    "k2": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
    "k3": {"reference_policy_kl_penalty": 0.1, "token_level_loss": False},
    "k3 approximated": {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
    "kl clamped": {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.1},
    "tis": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.1},
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.3,
        "truncated_importance_sampling_ratio_min": 0.7,
    },
    "seq-mask-tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "seq-mask-tis",
        "truncated_importance_sampling_ratio": 1.05,
        "truncated_importance_sampling_ratio_min": 0.95,
    },
    "vapo": {"positive_example_nll_weight": 0.2},
}
every_option = pytest.mark.parametrize("options", EVERY_OPTION.values(), ids=EVERY_OPTION.keys())


# Values


def test_clipped_ratio_has_the_worked_value_and_no_gradient_where_clipped() -> None:
    loss, gradient, _ = evaluate(three_tokens(), [CURRENT])
    assert loss == pytest.approx(-0.63333, abs=1e-5)
    # -A r / 3 for the first two tokens; the third is clipped.
    assert gradient[0].tolist() == pytest.approx([0.0, -0.5 / 3, 1.0 / 3, 0.0], abs=1e-5)


def test_cispo_has_the_worked_value_and_a_gradient_through_clipped_tokens() -> None:
    loss, gradient, _ = evaluate(three_tokens(), [CURRENT], use_cispo=True)
    assert loss == pytest.approx(0.59380, abs=1e-5)
    assert gradient[0].tolist() == pytest.approx([0.0, -0.8 / 3, 1.0 / 3, -2.4 / 3], abs=1e-5)


def test_importance_correction_has_the_worked_value() -> None:
    loss, _, _ = evaluate(three_tokens(), [CURRENT], use_importance_sampling_correction=True)
    assert loss == pytest.approx(-0.20650, abs=1e-5)


def test_kl_k3_has_the_worked_value() -> None:
    batch = make_batch([[0, 1, 1, 1]], reference_logprobs=[[0.0, -1.0, -1.0, -1.0]])
    loss, _, metrics = evaluate(batch, [[0.0, 0.0, -1.0, -2.0]], reference_policy_kl_penalty=0.1)
    assert loss == pytest.approx(0.03621, abs=1e-5)
    assert metrics["kl_penalty"] == pytest.approx(0.3621, abs=1e-4)


@pytest.mark.parametrize(("kl_type", "expected"), [("k1", [1.0, 0.0, -1.0]), ("k2", [0.5, 0.0, 0.5])])
def test_kl_k1_and_k2(kl_type: str, expected: list[float]) -> None:
    for token, value in enumerate(expected, start=1):
        mask = [[1.0 if t == token else 0.0 for t in range(4)]]
        batch = make_batch(mask, reference_logprobs=[[-1.0] * 4])
        loss, _, _ = evaluate(
            batch, [[0.0, 0.0, -1.0, -2.0]], reference_policy_kl_penalty=1.0, reference_policy_kl_type=kl_type
        )
        assert loss == pytest.approx(value)


def test_kl_weight_carries_the_score_function_gradient() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.5]])
    _, gradient, _ = evaluate(batch, [[0.0, -1.0]], reference_policy_kl_penalty=1.0)
    d = -0.5
    k3 = math.exp(d) - 1 - d
    assert gradient[0, 1] == pytest.approx(k3 + 1 - math.exp(d))  # k3 * dw + w * dk3, dw = 1


def test_input_clamped_tokens_have_no_kl_gradient() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -4.0]])
    options: dict[str, Any] = {"reference_policy_kl_penalty": 1.0, "kl_input_clamp_value": 2.0}
    loss, gradient, _ = evaluate(batch, [[0.0, -1.0]], **options)
    assert loss == pytest.approx(math.exp(-2) + 1)
    assert gradient[0, 1] == 0


def test_output_clamp_bounds_the_weighted_kl() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.0]])
    loss, gradient, _ = evaluate(batch, [[0.0, -5.0]], reference_policy_kl_penalty=0.5)  # k3 of d = 4: 49.6
    assert loss == pytest.approx(5.0)
    assert gradient[0, 1] == 0


def test_on_policy_kl_approximation_weighs_by_the_engines_logprobs() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.5]], generation_logprobs=[[0.0, -1.2]])
    options: dict[str, Any] = {"reference_policy_kl_penalty": 1.0, "reference_policy_kl_type": "k1"}
    loss, _, _ = evaluate(batch, [[0.0, -1.0]], use_on_policy_kl_approximation=True, **options)
    assert loss == pytest.approx(math.exp(0.2) * 0.5)


def test_kl_in_reward_leaves_the_loss_alone_and_is_still_measured() -> None:
    batch = make_batch([[0, 1]], reference_logprobs=[[0.0, -1.5]])
    loss, gradient, metrics = evaluate(batch, [[0.0, -1.0]], reference_policy_kl_penalty=1.0, use_kl_in_reward=True)
    assert (loss, gradient.abs().sum()) == (0.0, 0.0)
    assert metrics["kl_penalty"] > 0


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    batch = make_batch([[0, 1, 1]], advantages=[[0.0, -1.0, 1.0]], prev_logprobs=[[0.0, -3.0, -3.0]])
    current = [[0.0, -3.0 + math.log(5), -3.0 + math.log(5)]]  # ratios 5
    loss, gradient, _ = evaluate(batch, current, ratio_clip_c=3.0)
    assert loss == pytest.approx((3.0 - 1.2) / 2)
    assert gradient[0, 1] == 0
    assert evaluate(batch, current)[0] == pytest.approx((5.0 - 1.2) / 2)


def test_sequence_level_loss_is_the_mean_of_means() -> None:
    batch = make_batch([[0, 1, 1, 1], [0, 1, 0, 0]], advantages=[[1.0] * 4, [3.0] * 4])
    assert evaluate(batch, [[-1.0] * 4] * 2)[0] == pytest.approx(-6 / 4)
    assert evaluate(batch, [[-1.0] * 4] * 2, token_level_loss=False)[0] == pytest.approx(-(1 + 3) / 2)


def test_samples_of_one_trajectory_count_as_one_sequence() -> None:
    whole = make_batch([[0, 1, 1, 1, 1], [0, 1, 0, 0, 0]], advantages=[[1.0] * 5, [3.0] * 5])
    split = make_batch(
        [[0, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 1, 0, 0, 0]],
        trajectory_id=[0, 0, 1],
        advantages=[[1.0] * 5, [1.0] * 5, [3.0] * 5],
    )
    expected = evaluate(whole, [[-1.0] * 5] * 2, token_level_loss=False)[0]
    assert evaluate(split, [[-1.0] * 5] * 3, token_level_loss=False)[0] == pytest.approx(expected)


def test_gspo_ratio_is_the_geometric_mean_for_every_token() -> None:
    options: dict[str, Any] = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    batch = three_tokens(advantages=[[0.0, 1.0, 1.0, 1.0]])
    _, gradient, metrics = evaluate(batch, [CURRENT], **options)
    ratio = (0.5 * 1.0 * 1.5) ** (1 / 3)
    assert metrics["probs_ratio"] == pytest.approx(ratio, abs=1e-5)
    # Each token's loss is -r, and r depends on each token's log-prob with weight 1/3.
    assert gradient[0, 1:].tolist() == pytest.approx([-ratio / 3] * 3, abs=1e-5)


def test_gspo_correction_is_the_exp_of_the_sequences_sum() -> None:
    options: dict[str, Any] = {"token_level_loss": False, "sequence_level_importance_ratios": True}
    plain, _, _ = evaluate(three_tokens(), [CURRENT], **options)
    corrected, _, metrics = evaluate(three_tokens(), [CURRENT], use_importance_sampling_correction=True, **options)
    assert metrics["sampling_importance_ratio"] == pytest.approx(math.exp(-0.5 + 0.5 - 0.2))
    assert corrected == pytest.approx(plain * math.exp(-0.2), rel=1e-5)


def test_disable_ppo_ratio_is_reinforce() -> None:
    loss, gradient, _ = evaluate(three_tokens(), [CURRENT], disable_ppo_ratio=True)
    assert loss == pytest.approx((1.69315 - 1.0 + 2 * 0.59453) / 3)
    assert gradient[0].tolist() == pytest.approx([0.0, -1 / 3, 1 / 3, -2 / 3])


def test_force_on_policy_ratio_ignores_previous_logprobs() -> None:
    loss, gradient, metrics = evaluate(three_tokens(), [CURRENT], force_on_policy_ratio=True)
    assert loss == pytest.approx((-1 + 1 - 2) / 3)
    assert gradient[0].tolist() == pytest.approx([0.0, -1 / 3, 1 / 3, -2 / 3])
    assert metrics["probs_ratio"] == 1


@every_option
def test_without_previous_logprobs_the_current_ones_stand_in(options: dict[str, Any]) -> None:
    batch, current = random_batch()
    batch["prev_logprobs"] = current.clone()
    with_key = evaluate(batch, current.tolist(), **options)
    without_key = evaluate(batch.exclude("prev_logprobs"), current.tolist(), **options)
    assert with_key[0] == without_key[0]
    assert torch.equal(with_key[1], without_key[1])


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"truncated_importance_sampling_ratio": 1.2}, [0.60653, 1.2, 0.81873]),
        (
            {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.7},
            [0.7, 1.2, 0.81873],
        ),
        (
            {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_type": "icepop"},
            [0.60653, 0.0, 0.81873],
        ),
        (
            {
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.7,
                "truncated_importance_sampling_type": "icepop",
            },
            [0.0, 0.0, 0.81873],
        ),
        (  # geometric mean exp(-.2 / 3) = .9355
            {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_type": "seq-mask-tis"},
            [0.60653, 1.64872, 0.81873],
        ),
        (
            {
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.95,
                "truncated_importance_sampling_type": "seq-mask-tis",
            },
            [0.0, 0.0, 0.0],
        ),
    ],
)
def test_truncated_weights(options: dict[str, Any], weights: list[float]) -> None:
    _, gradient, _ = evaluate(
        three_tokens(), [PREV], use_importance_sampling_correction=True, disable_ppo_ratio=True, **options
    )
    expected = [-a * w / 3 for a, w in zip([1, -1, 2], weights, strict=True)]
    assert gradient[0, 1:].tolist() == pytest.approx(expected, abs=1e-5)


def test_out_of_bounds_ratio_is_the_share_of_tokens() -> None:
    options: dict[str, Any] = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2}
    assert evaluate(three_tokens(), [CURRENT], **options)[2]["is_oob_ratio"] == pytest.approx(1 / 3)


def test_positive_examples_add_their_negative_log_likelihood() -> None:
    batch = make_batch([[0, 1], [0, 1], [0, 1]], rewards=[1.0, 0.0, -1.0])
    loss, gradient, _ = evaluate(batch, [[0.0, -2.0]] * 3, positive_example_nll_weight=0.3)
    assert loss == pytest.approx(0.3 * 2 / 3)
    assert gradient[:, 1].tolist() == pytest.approx([-0.1, 0.0, 0.0])


# Gradients and invariance


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
    loss_fn = PolicyGradientLoss(LossFn(**EVERY_OPTION[name]))
    _, gradient, _ = evaluate(batch, current.tolist(), **EVERY_OPTION[name])
    step = 2e-3
    for b, t in (batch["token_mask"] > 0).nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = current.clone()
            moved[b, t] += sign * step
            ends.append(float(loss_fn(moved, batch, normalizer_of(batch))[0]))
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


# Keys and configuration


@every_option
def test_required_keys_are_enough(options: dict[str, Any]) -> None:
    batch, current = random_batch()
    loss_fn = PolicyGradientLoss(LossFn(**options))
    loss_fn(current, batch.select(*loss_fn.required_keys), normalizer_of(batch))


def test_keys_follow_the_options() -> None:
    plain = {keys.TOKEN_MASK, keys.SAMPLE_MASK, keys.GENERATION_LOGPROBS, keys.ADVANTAGES}
    assert PolicyGradientLoss(LossFn()).required_keys == plain
    assert PolicyGradientLoss(LossFn(reference_policy_kl_penalty=0.1)).required_keys == plain | {
        keys.REFERENCE_LOGPROBS
    }


@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ({}, True),
        ({"force_on_policy_ratio": True}, False),
        ({"force_on_policy_ratio": True, "use_importance_sampling_correction": True}, False),
        ({"disable_ppo_ratio": True}, False),
        ({"disable_ppo_ratio": True, "use_importance_sampling_correction": True}, True),
    ],
)
def test_previous_logprobs_are_used_only_where_something_reads_them(options: dict[str, Any], uses: bool) -> None:
    assert PolicyGradientLoss(LossFn(**options)).uses_prev_logprobs is uses


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "use_cispo"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo"),
        (
            {"use_cispo": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
            "use_cispo",
        ),
        ({"disable_ppo_ratio": True, "force_on_policy_ratio": True}, "disable_ppo_ratio"),
        ({"sequence_level_importance_ratios": True}, "token_level_loss"),
        ({"truncated_importance_sampling_ratio": 2.0}, "use_importance_sampling_correction"),
        (
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "icepop"},
            "truncated_importance_sampling_ratio",
        ),
        (
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio_min": 0.5},
            "truncated_importance_sampling_ratio_min",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        PolicyGradientLoss(LossFn(**options))


# Metrics


def test_ratio_metrics() -> None:
    metrics = evaluate(three_tokens(), [CURRENT])[2]
    expected = {
        "probs_ratio": 1.0,
        "probs_ratio_min": 0.5,
        "probs_ratio_max": 1.5,
        "probs_ratio_clamped": (0.8 + 1.0 + 1.2) / 3,
        "probs_ratio_clamped_min": 0.8,
        "probs_ratio_clamped_max": 1.2,
        "num_valid_samples": 1.0,
        "kl_penalty": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_metrics_of_trainer_against_engine() -> None:
    metrics = evaluate(three_tokens(), [CURRENT])[2]
    errors = [-0.5, 0.5, -0.2]  # lp_prev - lp_gen

    def mean(values: list[float]) -> float:
        return sum(values) / 3

    def k3(d: float) -> float:
        return math.exp(d) - 1 - d

    def divergence(prev: float, generation: float) -> float:
        mixture = math.log((math.exp(prev) + math.exp(generation)) / 2)
        return (k3(prev - mixture) + k3(generation - mixture)) / 2

    tokens = list(zip(CURRENT[1:], PREV[1:], GENERATION[1:], strict=True))
    expected = {
        "token_mult_prob_error": mean([math.exp(abs(e)) for e in errors]),
        "gen_kl_error": mean([k3(e) for e in errors]),
        "policy_kl_error": mean([k3(-e) for e in errors]),
        "js_divergence_error": mean([divergence(prev, gen) for _, prev, gen in tokens]),
        "sampling_importance_ratio": mean([math.exp(e) for e in errors]),
        "approx_entropy": mean([-math.exp(lp - gen) * lp for lp, _, gen in tokens]),
        "max_logprob_error": 0.5,
        "is_oob_ratio": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
