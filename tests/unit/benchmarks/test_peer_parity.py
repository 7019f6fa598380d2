"""benchmarks/peer_parity.py: a configuration in TRL's words, and what is said of two trainers over several seeds."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_rl.config.loading import load_config
from nemo_rl.errors import ConfigError

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "examples" / "configs" / "quickstart.yaml"
parity = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "peer_parity.py")))

runners = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "peer_runners.py")))


def trl_arguments(*overrides: str) -> dict[str, object]:
    return parity.trl_arguments(load_config(RECIPE, ["grpo.adv_estimator.std_epsilon=1e-4", *overrides]))


def test_the_quickstart_in_trls_words() -> None:
    arguments = trl_arguments("grpo.seed=3")
    expected = {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "beta": 0.0,
        "scale_rewards": "group",
        "num_generations": 8,
        "per_device_train_batch_size": 256,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "max_completion_length": 8,
        "temperature": 1.0,
        "top_k": 0,
        "learning_rate": 3e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "seed": 3,
        "vllm_importance_sampling_correction": False,
    }
    assert {key: arguments[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["++loss_fn.ratio_clip_min=0.1", "++loss_fn.ratio_clip_max=0.3"], "epsilon", 0.1),
        (["++loss_fn.ratio_clip_min=0.1", "++loss_fn.ratio_clip_max=0.3"], "epsilon_high", 0.3),
        (["++loss_fn.token_level_loss=false"], "loss_type", "grpo"),
        (["++loss_fn.token_level_loss=false", "++loss_fn.trajectory_token_divisor=8"], "loss_type", "dr_grpo"),
        (["++loss_fn.ratio_clip_c=3"], "delta", 3.0),
        (["++grpo.adv_estimator.normalize_rewards=false"], "scale_rewards", "none"),
        (["++grpo.adv_estimator.normalization_scope=batch"], "scale_rewards", "batch"),
        (["policy.generation.ignore_eos=true"], "generation_kwargs", {"ignore_eos": True, "stop_token_ids": []}),
        (
            ["++policy.generation.stop_token_ids=[5]"],
            "generation_kwargs",
            {"ignore_eos": False, "stop_token_ids": [5]},
        ),
        (["grpo.num_prompts_per_step=4"], "per_device_train_batch_size", 32),
    ],
)
def test_an_option_in_trls_words(overrides: list[str], key: str, value: object) -> None:
    assert trl_arguments(*overrides)[key] == value


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("++loss_fn.type=cispo", "loss_fn.type"),
        ("++grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.name"),
        ("grpo.adv_estimator.std_epsilon=1e-6", "grpo.adv_estimator.std_epsilon"),
        ("++loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.reference_policy_kl_penalty"),
        ("policy.optimizer.kwargs.weight_decay=0.1", "policy.optimizer.kwargs.weight_decay"),
        ("~policy.optimizer.kwargs.weight_decay", "policy.optimizer.kwargs.weight_decay"),
        ("policy.train_global_batch_size=128", "policy.train_global_batch_size"),
        ("++grpo.use_dynamic_sampling=true", "grpo.use_dynamic_sampling"),
    ],
)
def test_what_the_two_do_not_both_have_is_refused(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trl_arguments(override)
    assert refused.value.key == key


def test_a_divisor_other_than_the_longest_response_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        trl_arguments("++loss_fn.token_level_loss=false", "++loss_fn.trajectory_token_divisor=7")
    assert refused.value.key == "loss_fn.trajectory_token_divisor"


def test_comparison_over_three_seeds() -> None:
    found = parity.compare([0.91, 0.92, 0.93], [0.90, 0.90, 0.90], margin=0.05)
    assert found.mean == pytest.approx(0.02)
    assert found.std == pytest.approx(0.01)
    assert found.half_width == pytest.approx(2.920 * 0.01 / 3**0.5)  # .01686
    assert found.is_equivalent


@pytest.mark.parametrize(("margin", "is_equivalent"), [(0.0368, False), (0.0369, True)])
def test_the_whole_interval_must_lie_within_the_margin(margin: float, is_equivalent: bool) -> None:
    # .02 + .01686 = .03686, on either side
    assert parity.compare([0.91, 0.92, 0.93], [0.90] * 3, margin).is_equivalent is is_equivalent
    assert parity.compare([0.90] * 3, [0.91, 0.92, 0.93], margin).is_equivalent is is_equivalent


def test_power_is_the_share_of_equal_trainers_that_are_found_equivalent() -> None:
    # The mean of two differences of deviation 1 is normal with deviation .7071, their own deviation |d| / 2**.5 with d
    # normal of deviation 2**.5: equivalent where |mean| + 6.314 |d| / 2 < 5.
    assert parity.equivalence_power(1.0, 2, 5.0) == pytest.approx(_integrated_power(5.0), abs=0.01)
    assert parity.equivalence_power(0.01, 5, 0.05) > 0.99
    assert parity.equivalence_power(0.1, 5, 0.05) < 0.05


def _integrated_power(margin: float) -> float:
    """Return P(|m| + 3.157 |d| < margin) with m ~ N(0, 1/2) and d ~ N(0, 2), by a sum over d."""
    from statistics import NormalDist

    mean, difference, width = NormalDist(0, 0.5**0.5), NormalDist(0, 2**0.5), 1e-4
    total = 0.0
    for index in range(int(margin / 3.157 / width)):
        d = (index + 0.5) * width
        rest = margin - 3.157 * d
        total += 2 * difference.pdf(d) * width * (mean.cdf(rest) - mean.cdf(-rest))
    return total


def test_mean_of_a_curve_measured_at_uneven_steps() -> None:
    assert parity.mean_of_curve({30: 1.0, 0: 0.0, 10: 1.0}) == pytest.approx(25 / 30)


def test_seconds_to_the_first_measured_step_at_the_level() -> None:
    curve, seconds = {0: 0.2, 2: 0.6, 4: 0.9}, [1.0, 2.0, 3.0, 4.0, 5.0]
    assert parity.seconds_to(curve, 0.5, seconds) == 3.0
    assert parity.seconds_to(curve, 0.9, seconds) == 10.0
    assert parity.seconds_to(curve, 0.95, seconds) is None


def side(sampled: dict[str, float], reward: list[float]) -> dict[str, object]:
    """Return a run as it is kept: steps are the keys of a JSON object."""
    return {
        "sampled": sampled,
        "greedy": sampled,
        "reward": reward,
        "seconds": [2.0] * len(reward),
        "start_s": 5.0,
    }


def test_report_compares_the_steps_that_all_runs_have() -> None:
    results = {
        "0": {"own": side({"0": 0.2, "2": 0.86}, [0.5, 0.7]), "trl": side({"0": 0.2, "2": 0.84}, [0.5, 0.6])},
        "1": {
            "own": side({"0": 0.2, "2": 0.88, "4": 0.0}, [0.5, 0.7, 0.0, 0.0]),
            "trl": side({"0": 0.2, "2": 0.86}, [0.5, 0.6]),
        },
    }
    lines = parity.report(results)
    # Differences .02 and .02 at step 2, and none between seeds.
    assert "| sampled accuracy at the end | 0.8700 | 0.8500 | +0.0200 +- 0.0000 | 0.0000 | yes (0.03) | 1.00 |" in lines
    assert (
        "| training reward, mean of all steps | 0.6000 | 0.5500 | +0.0500 +- 0.0000 | 0.0000 | no (0.03) | 1.00 |"
        in lines
    )
    assert "| 0 | own | 4.0 | 4.0 | 5.0 |" in lines
    assert "| 0 | trl | never | 4.0 | 5.0 |" in lines
    assert "| 0 | 0.200 | 0.200 | 0.000 |" in lines


def test_one_seed_is_not_compared() -> None:
    assert "nothing to compare" in parity.report({"0": {"own": side({"0": 0.2}, []), "trl": side({"0": 0.2}, [])}})[0]


def test_held_out_accuracy_is_the_probability_of_the_answer_with_its_end() -> None:
    # Each token is followed by the next one with probability .5, by the two others with .25 each.
    following = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]).log()

    def model(input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=following[input_ids] + 7.0)

    rows = [
        {"token_ids": [0], "answer_ids": [1, 2]},  # .5 x .5, greedy
        {"token_ids": [0, 1], "answer_ids": [2, 0, 0]},  # .5 x .5 x .25, not greedy at its end
    ]
    found = runners.held_out_accuracy(model, rows)
    assert math.isclose(found["sampled"], (0.25 + 0.0625) / 2, rel_tol=1e-6)
    assert found["greedy"] == 0.5
