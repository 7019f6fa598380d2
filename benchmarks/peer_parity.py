"""The pure parts of benchmarks/peers.py: a configuration of this project as TRL's arguments, and the comparison of two
trainers over seeds by paired differences, their confidence interval, a test for equivalence, and its power."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl.algorithms.estimators import GRPOEstimatorConfig
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.errors import ConfigError
from nemo_rl.losses.surrogates import PPOConfig

# Student's t at 0.95 by degrees of freedom: the two-sided 90% interval, of two one-sided tests at 5% each.
T_95 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
POWER_DRAWS = 100_000
MARGIN = 0.03  # of accuracy; the differences that matter between recipes are several times that
LEVEL = 0.85  # of the held-out accuracy
STEPS_OF_ENDS = 20  # the last training rewards, of 256 rollouts each


def trl_arguments(config: GRPORunConfig) -> dict[str, Any]:
    """Return the arguments of TRL's GRPOConfig that compute what a configuration of this project computes.

    Raises ConfigError for what the two do not both have, or do not compute alike.
    """
    grpo, policy, generation, loss = config.grpo, config.policy, config.policy.generation, config.loss_fn
    estimator, optimizer = grpo.adv_estimator, policy.optimizer.kwargs
    samples = grpo.num_samples_per_step
    check_both_have(config)
    assert isinstance(loss, PPOConfig)
    assert isinstance(estimator, GRPOEstimatorConfig)
    of_trajectories = "grpo" if loss.trajectory_token_divisor is None else "dr_grpo"
    return {
        "loss_type": "dapo" if loss.token_level_loss else of_trajectories,
        "beta": 0.0,
        "epsilon": loss.ratio_clip_min,
        "epsilon_high": loss.ratio_clip_max,
        "delta": loss.ratio_clip_c,
        "importance_sampling_level": "token",
        "vllm_importance_sampling_correction": False,
        "scale_rewards": estimator.normalization_scope if estimator.normalize_rewards else "none",
        "num_generations": grpo.num_generations_per_prompt,
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "mask_truncated_completions": False,
        "max_completion_length": generation.max_new_tokens,
        "temperature": generation.temperature,
        "top_p": 1.0,
        "top_k": 0,
        # TRL's engine ends a response at these and at the end of sequence.
        "generation_kwargs": {
            "ignore_eos": generation.ignore_eos,
            "stop_token_ids": [] if generation.ignore_eos else generation.stop_token_ids or [],
        },
        "optim": "adamw_torch",
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "adam_epsilon": optimizer.get("eps", 1e-8),
        "weight_decay": 0.0,
        "max_grad_norm": policy.max_grad_norm,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "seed": grpo.seed,
        "shuffle_dataset": False,  # the rows are in the order in which this project draws them
        "bf16": False,
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": policy.max_total_sequence_length,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def check_both_have(config: GRPORunConfig) -> None:
    """Raise ConfigError for options that TRL lacks, or computes in another way."""
    grpo, policy, loss, estimator = config.grpo, config.policy, config.loss_fn, config.grpo.adv_estimator
    if not isinstance(loss, PPOConfig):
        raise ConfigError("loss_fn.type", loss.type, "must be ppo to compare with TRL")
    if not isinstance(estimator, GRPOEstimatorConfig):
        raise ConfigError("grpo.adv_estimator.name", estimator.name, "must be grpo to compare with TRL")
    kwargs = policy.optimizer.kwargs
    wanted: dict[str, tuple[Any, Any]] = {
        "policy.optimizer.name": (policy.optimizer.name, "torch.optim.AdamW"),
        "policy.optimizer.kwargs.weight_decay": (kwargs.get("weight_decay", 0.01), 0.0),  # TRL spares norms and biases
        "policy.precision": (policy.precision, "float32"),
        "policy.scheduler": (bool(policy.scheduler), False),
        "policy.train_global_batch_size": (policy.train_global_batch_size, grpo.num_samples_per_step),
        "policy.train_micro_batch_size": (policy.train_micro_batch_size, grpo.num_samples_per_step),
        "grpo.adv_estimator.std_epsilon": (estimator.std_epsilon, 1e-4),
        "grpo.adv_estimator.use_leave_one_out_baseline": (estimator.use_leave_one_out_baseline, False),
        "grpo.use_dynamic_sampling": (grpo.use_dynamic_sampling, False),
        "grpo.overlong_filtering": (grpo.overlong_filtering, False),
        "grpo.reward_scaling.enabled": (grpo.reward_scaling.enabled, False),
        "grpo.reward_shaping.enabled": (grpo.reward_shaping.enabled, False),
        "grpo.async_grpo.enabled": (grpo.async_grpo.enabled, False),
        "loss_fn.reference_policy_kl_penalty": (loss.reference_policy_kl_penalty, 0.0),
        "loss_fn.use_importance_sampling_correction": (loss.use_importance_sampling_correction, False),
        "loss_fn.positive_example_nll_weight": (loss.positive_example_nll_weight, 0.0),
        "policy.generation.top_p": (policy.generation.top_p, 1.0),  # TRL's log-probs are of the whole distribution
        "policy.generation.top_k": (policy.generation.top_k, None),
        "policy.generation.stop_strings": (policy.generation.stop_strings or [], []),
    }
    if not loss.token_level_loss and loss.trajectory_token_divisor is not None:
        wanted["loss_fn.trajectory_token_divisor"] = (
            loss.trajectory_token_divisor,
            policy.generation.max_new_tokens,
        )
    for key, (value, allowed) in wanted.items():
        if value != allowed:
            raise ConfigError(key, value, f"must be {allowed!r} to compare with TRL")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired differences over seeds, ours less the peer's."""

    mean: float
    std: float
    half_width: float  # of the 90% confidence interval of the mean
    margin: float
    power: float  # of the test for equivalence, were both the same and the deviation the observed one

    @property
    def is_equivalent(self) -> bool:
        """Return whether the whole interval lies within the margin: both one-sided tests reject at 5%."""
        return abs(self.mean) + self.half_width < self.margin


def compare(own: Sequence[float], peer: Sequence[float], margin: float) -> Comparison:
    """Compare one figure of each seed: two one-sided paired t-tests (Schuirmann 1987) of |difference| < margin.

    Example: differences .01, .02, .03 and a margin of .05: mean .02, interval .02 +- .0169, equivalent.
    """
    differences = [a - b for a, b in zip(own, peer, strict=True)]
    std = statistics.stdev(differences)
    half_width = T_95[len(differences) - 1] * std / math.sqrt(len(differences))
    power = equivalence_power(std, len(differences), margin)
    return Comparison(statistics.fmean(differences), std, half_width, margin, power)


def equivalence_power(std: float, count: int, margin: float) -> float:
    """Return how often `compare` finds two equal trainers equivalent, for normal differences of deviation `std`."""
    rng = np.random.default_rng(0)
    means = rng.normal(0.0, std / math.sqrt(count), POWER_DRAWS)
    stds = std * np.sqrt(rng.chisquare(count - 1, POWER_DRAWS) / (count - 1))
    return float(np.mean(np.abs(means) + T_95[count - 1] * stds / math.sqrt(count) < margin))


def mean_of_curve(curve: Mapping[int, float]) -> float:
    """Return the area under a curve of values by step (trapezoids), over its length in steps.

    Example: {0: 0, 10: 1, 30: 1} -> (5 + 20) / 30 = .833.
    """
    steps = sorted(curve)
    area = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in itertools.pairwise(steps))
    return area / (steps[-1] - steps[0])


def seconds_to(curve: Mapping[int, float], level: float, step_seconds: Sequence[float]) -> float | None:
    """Return the seconds of the steps up to the first measured one at `level` or above; None: never."""
    reached = [step for step in sorted(curve) if curve[step] >= level]
    return math.fsum(step_seconds[: reached[0]]) if reached else None


def report(results: Mapping[str, Mapping[str, Any]], level: float = LEVEL) -> list[str]:
    """Return the tables of the comparison; results are by seed, then by side, as `learn` and JSON give them.

    All curves are cut at the last step that every seed has on both sides.
    """
    if len(results) < 2:
        return [f"{len(results)} seed of two or more has been trained: nothing to compare yet"]
    runs = {side: [shorten(seed[side], results) for seed in results.values()] for side in ("own", "trl")}
    figures = {side: summarize(each) for side, each in runs.items()}
    lines = [
        "| figure | nemo-rl | TRL | difference, 90% interval | std of differences | within the margin | power |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in figures["own"].items():
        trl = figures["trl"][name]
        lines.append(comparison_row(name, own, trl, compare(own, trl, MARGIN)))
    lines += ["", f"| seed | side | s to {level} | s of all steps | start s |", "|---|---|---|---|---|"]
    for side, each in runs.items():
        for seed, run in zip(results, each, strict=True):
            reached = seconds_to(run["sampled"], level, run["seconds"])
            shown = "never" if reached is None else f"{reached:.1f}"
            lines.append(f"| {seed} | {side} | {shown} | {sum(run['seconds']):.1f} | {run['start_s']:.1f} |")
    lines += ["", "| step | nemo-rl | TRL | largest difference of a seed |", "|---|---|---|---|"]
    for step in (step for step in runs["own"][0]["sampled"] if step % 10 == 0):
        pair = [[run["sampled"][step] for run in runs[side]] for side in ("own", "trl")]
        largest = max(abs(own - trl) for own, trl in zip(*pair, strict=True))
        means = " | ".join(f"{statistics.fmean(values):.3f}" for values in pair)
        lines.append(f"| {step} | {means} | {largest:.3f} |")
    return lines


def shorten(run: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a run up to the last evaluation that all runs have."""
    last = min(max(int(step) for step in other["sampled"]) for sides in results.values() for other in sides.values())
    curves = {
        name: {int(step): value for step, value in run[name].items() if int(step) <= last}
        for name in ("sampled", "greedy")
    }
    return {**curves, "reward": run["reward"][:last], "seconds": run["seconds"][:last], "start_s": run["start_s"]}


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the figures that are compared: one value for each seed."""
    return {
        "sampled accuracy at the end": [run["sampled"][len(run["reward"])] for run in runs],
        "sampled accuracy, mean of the curve": [mean_of_curve(run["sampled"]) for run in runs],
        "greedy accuracy at the end": [run["greedy"][len(run["reward"])] for run in runs],
        "training reward, mean of all steps": [statistics.fmean(run["reward"]) for run in runs],
        f"training reward, last {STEPS_OF_ENDS} steps": [
            statistics.fmean(run["reward"][-STEPS_OF_ENDS:]) for run in runs
        ],
    }


def comparison_row(name: str, own: Sequence[float], trl: Sequence[float], found: Comparison) -> str:
    means = " | ".join(f"{statistics.fmean(values):.4f}" for values in (own, trl))
    return (
        f"| {name} | {means} | {found.mean:+.4f} +- {found.half_width:.4f} | {found.std:.4f} "
        f"| {'yes' if found.is_equivalent else 'no'} ({found.margin}) | {found.power:.2f} |"
    )
