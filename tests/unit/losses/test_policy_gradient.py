import math
from typing import Any

import pytest
import torch

from nemo_rl import batch as keys
from nemo_rl.compat.translation import translate_loss_switches
from nemo_rl.config.entry_checks import check_grpo
from nemo_rl.config.registries import LOSSES
from nemo_rl.errors import ConfigError
from nemo_rl.loss_types import TokenScores
from nemo_rl.losses.make import make_loss
from tests.unit.algorithms.batches import make_batch, normalizer_of
from tests.unit.algorithms.run_setup import make_config
from tests.unit.losses.evaluation import (
    CURRENT,
    evaluate,
    every_option,
    random_batch,
    three_tokens,
)


def test_clipped_ratio_has_the_worked_value_and_no_gradient_where_clipped() -> None:
    loss, gradient, _ = evaluate(three_tokens(), [CURRENT])
    assert loss == pytest.approx(-0.63333, abs=1e-5)
    # -A r / 3 for the first two tokens; the third is clipped.
    assert gradient[0].tolist() == pytest.approx([0.0, -0.5 / 3, 1.0 / 3, 0.0], abs=1e-5)


def test_cispo_has_the_worked_value_and_a_gradient_through_clipped_tokens() -> None:
    loss, gradient, _ = evaluate(three_tokens(), [CURRENT], type="cispo")
    assert loss == pytest.approx(0.59380, abs=1e-5)
    assert gradient[0].tolist() == pytest.approx([0.0, -0.8 / 3, 1.0 / 3, -2.4 / 3], abs=1e-5)


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
    options: dict[str, Any] = {"type": "gspo"}
    batch = three_tokens(advantages=[[0.0, 1.0, 1.0, 1.0]])
    _, gradient, metrics = evaluate(batch, [CURRENT], **options)
    ratio = (0.5 * 1.0 * 1.5) ** (1 / 3)
    assert metrics["probs_ratio"] == pytest.approx(ratio, abs=1e-5)
    # Each token's loss is -r, and r depends on each token's log-prob with weight 1/3.
    assert gradient[0, 1:].tolist() == pytest.approx([-ratio / 3] * 3, abs=1e-5)


def test_reinforce_has_no_ratio() -> None:
    loss, gradient, _ = evaluate(three_tokens(), [CURRENT], type="reinforce")
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


def test_positive_examples_add_their_negative_log_likelihood() -> None:
    batch = make_batch([[0, 1], [0, 1], [0, 1]], rewards=[1.0, 0.0, -1.0])
    loss, gradient, _ = evaluate(batch, [[0.0, -2.0]] * 3, positive_example_nll_weight=0.3)
    assert loss == pytest.approx(0.3 * 2)  # over the one positive token, not over all three
    assert gradient[:, 1].tolist() == pytest.approx([-0.3, 0.0, 0.0])


@pytest.mark.parametrize("options", [{}, {"token_level_loss": False}, {"use_importance_sampling_correction": True}])
def test_positive_examples_count_a_token_each_whatever_the_policy_term_does(options: dict[str, Any]) -> None:
    batch = make_batch([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]], rewards=[0.5, 1.0, 0.0])
    logprobs = [[0.0, -1.0, -2.0, -3.0], [0.0, -6.0, 0.0, 0.0], [0.0, -9.0, -9.0, 0.0]]
    with_term = evaluate(batch, logprobs, positive_example_nll_weight=0.1, **options)[0]
    assert with_term - evaluate(batch, logprobs, **options)[0] == pytest.approx(0.1 * (1 + 2 + 3 + 6) / 4)


def test_without_positive_examples_the_term_is_zero() -> None:
    batch = make_batch([[0, 1]], rewards=[0.0])
    assert evaluate(batch, [[0.0, -2.0]], positive_example_nll_weight=0.3)[0] == 0


def test_bounds_of_the_clip_are_told_apart() -> None:
    """Ratios .5, 1, 1.5; A = 1, -1, 2: only A > 0 meets the upper bound, and the lower one needs A < 0."""
    assert evaluate(three_tokens(), [CURRENT], ratio_clip_min=0.1, ratio_clip_max=0.4)[0] == pytest.approx(
        (-0.5 + 1.0 - 2.8) / 3, abs=1e-5
    )
    falling = three_tokens(advantages=[[0.0, -1.0, -1.0, 2.0]])
    assert evaluate(falling, [CURRENT], ratio_clip_min=0.1, ratio_clip_max=0.4)[0] == pytest.approx(
        (0.9 + 1.0 - 2.8) / 3, abs=1e-5
    )
    _, gradient, metrics = evaluate(three_tokens(), [CURRENT], type="cispo", ratio_clip_min=0.1, ratio_clip_max=0.4)
    assert gradient[0].tolist() == pytest.approx([0.0, -0.9 / 3, 1.0 / 3, -2.8 / 3], abs=1e-5)
    assert (metrics["probs_ratio_clamped_min"], metrics["probs_ratio_clamped_max"]) == pytest.approx((0.9, 1.4))


@every_option
def test_required_keys_are_enough(options: dict[str, Any]) -> None:
    batch, current = random_batch()
    loss_fn = make_loss(LOSSES.read(options))
    loss_fn(TokenScores(current), batch.select(*loss_fn.required_keys), normalizer_of(batch))


def test_keys_follow_the_options() -> None:
    plain = {keys.TOKEN_MASK, keys.SAMPLE_MASK, keys.GENERATION_LOGPROBS, keys.ADVANTAGES}
    assert make_loss(LOSSES.new()).required_keys == plain
    assert make_loss(LOSSES.read({"reference_policy_kl_penalty": 0.1})).required_keys == plain | {
        keys.REFERENCE_LOGPROBS
    }


@pytest.mark.parametrize(
    ("options", "uses"),
    [
        ({}, True),
        ({"force_on_policy_ratio": True}, False),
        ({"force_on_policy_ratio": True, "use_importance_sampling_correction": True}, False),
        ({"type": "reinforce"}, False),
        ({"type": "reinforce", "use_importance_sampling_correction": True}, True),
    ],
)
def test_previous_logprobs_are_used_only_where_something_reads_them(options: dict[str, Any], uses: bool) -> None:
    assert LOSSES.read(options).uses_prev_logprobs is uses


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
            "truncated_importance_sampling_ratio",
        ),
        (
            {"ratio_against": "generation", "use_importance_sampling_correction": True},
            "use_importance_sampling_correction",
        ),
        ({"ratio_against": "generation", "force_on_policy_ratio": True}, "force_on_policy_ratio"),
        (
            {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.1, "reference_policy_kl_gradient": "k2"},
            "reference_policy_kl_gradient",
        ),
        (
            {"reference_policy_kl_gradient": "pathwise", "use_on_policy_kl_approximation": True},
            "use_on_policy_kl_approximation",
        ),
        (
            {
                "type": "vespo",
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "sequence_mask",
                "truncated_importance_sampling_ratio": 3.0,
            },
            "truncated_importance_sampling_type",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        translate_and_check(options)


def translate_and_check(options: dict[str, Any]) -> None:
    config = {"loss_fn": dict(options)}
    translate_loss_switches(config)
    check_grpo(make_config(loss_fn=config["loss_fn"]))


@pytest.mark.parametrize("loss_type", ["ppo", "gspo"])
def test_a_sequence_of_one_token_has_the_ratio_of_that_token(loss_type: str) -> None:
    batch = make_batch([[0, 1]], prev_logprobs=[[0.0, -1.0]], advantages=[[0.0, 1.0]])
    loss, gradient, metrics = evaluate(batch, [[0.0, -0.9]], type=loss_type)
    assert loss == pytest.approx(-math.exp(0.1))
    assert gradient.tolist() == [[0.0, pytest.approx(-math.exp(0.1))]]
    assert metrics["probs_ratio"] == pytest.approx(math.exp(0.1))
