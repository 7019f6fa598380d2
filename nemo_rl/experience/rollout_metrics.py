"""Metrics of the rollouts of a step."""

import statistics
from collections import Counter
from collections.abc import Sequence

from nemo_rl.types import FailureClass, StopReason, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics by name, without prefix; empty for no rollouts.

    Rates and `response_faults/<fault>` are shares of all rollouts, and `failures/<class>` are counts. Turns, tokens and
    rewards are those of the rollouts that did not fail. `env/<name>/...` are those of one environment, or of one of
    NeMo Gym's agents: a few always, and with several environments all of them; `reward/<name>` if rewards have several
    names; `policies/<policy>/reward_mean` in a run of several policies.
    """
    if not trajectories:
        return {}
    by_environment: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_environment.setdefault(trajectory.prompt.env, []).append(trajectory)
    metrics = _compute_metrics(trajectories) | baseline_metrics(trajectories) | policy_reward_metrics(trajectories)
    for environment, environment_trajectories in sorted(by_environment.items()):
        several = _compute_metrics(environment_trajectories) if len(by_environment) > 1 else {}
        metrics |= {
            f"env/{environment}/{name}": value
            for name, value in (several | _brief_metrics(environment_trajectories)).items()
        }
    return metrics


def baseline_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the percentages of groups whose mean reward is 0, 1, or another: what NeMo-RL calls `baseline_reward`.

    Rollouts without a reward do not count. Rewards of 0 and 1 alone: groups that are all wrong, all right, and mixed,
    which are those with a gradient.
    """
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.failure is None and trajectory.rewards:
            rewards.setdefault(trajectory.group_id, []).append(trajectory.reward)
    if not rewards:
        return {}
    means = [statistics.fmean(values) for values in rewards.values()]
    zeros, ones = (100 * means.count(value) / len(means) for value in (0.0, 1.0))
    return {
        "baseline_reward/pct_0": zeros,
        "baseline_reward/pct_1": ones,
        "baseline_reward/pct_mixed": 100 - zeros - ones,
    }


def policy_reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `policies/<policy>/reward_mean`, the mean reward of each policy over the rollouts in which it spoke.

    Empty in a run of one policy.
    """
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for policy, own in trajectory.policy_rewards.items():
            rewards.setdefault(policy, []).append(sum(own.values()))
    return {f"policies/{policy}/reward_mean": statistics.fmean(values) for policy, values in sorted(rewards.items())}


def response_fault_rates(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `response_faults/<fault>`, the share of all rollouts with each fault that occurs."""
    counts = Counter(fault for t in trajectories for fault in t.response_faults)
    return {f"response_faults/{fault}": counts[fault] / len(trajectories) for fault in sorted(counts)}


def age_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """Return the mean and maximum of steps from the oldest weights that sampled a rollout to those that it trains."""
    ages = [weight_version - t.weight_versions[0] for t in trajectories if t.failure is None]
    return {"avg_trajectory_age": statistics.fmean(ages), "max_trajectory_age": float(max(ages))} if ages else {}


def _compute_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    survivors = [t for t in trajectories if t.failure is None]
    metrics = {"num_rollouts": float(len(trajectories))}
    metrics |= {f"failures/{name}": float(_count_failed(trajectories, name)) for name in FailureClass}
    metrics |= {
        "natural_termination_rate": _stop_reason_rate(trajectories, StopReason.DONE),
        "truncation_rate": _stop_reason_rate(trajectories, StopReason.TRUNCATED),
        "max_turns_reached_rate": _stop_reason_rate(trajectories, StopReason.MAX_TURNS),
    }
    metrics |= response_fault_rates(trajectories)
    return metrics | _length_metrics(survivors) | _mean_named_rewards(survivors) if survivors else metrics


def _length_metrics(survivors: Sequence[Trajectory]) -> dict[str, float]:
    turns = [t.num_turns for t in survivors]
    generated = [t.num_generated_tokens for t in survivors]
    return {
        "total_turns": float(sum(turns)),
        "avg_turns_per_sample": statistics.fmean(turns),
        "max_turns_per_sample": float(max(turns)),
        "mean_total_tokens_per_sample": statistics.fmean([t.num_tokens for t in survivors]),
        "mean_gen_tokens_per_sample": statistics.fmean(generated),
        "max_gen_tokens_per_sample": float(max(generated)),
        "mean_env_tokens_per_sample": statistics.fmean([_num_environment_tokens(t) for t in survivors]),
    }


def _num_environment_tokens(trajectory: Trajectory) -> int:
    """Count context tokens after the first response: those of the environment and of the template around it."""
    lengths = [(message.is_generated, len(message.token_ids)) for message in trajectory.message_log]
    first = next((i for i, (is_generated, _) in enumerate(lengths) if is_generated), len(lengths))
    return sum(length for is_generated, length in lengths[first:] if not is_generated)


def _mean_named_rewards(survivors: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each named reward over the rollouts that have it."""
    names = sorted({name for t in survivors for name in t.rewards})
    if len(names) < 2:
        return {}
    return {f"reward/{n}": statistics.fmean([t.rewards[n] for t in survivors if n in t.rewards]) for n in names}


def _brief_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics that tell environments apart at a glance."""
    survivors = [t for t in trajectories if t.failure is None]
    metrics = {
        "truncation_rate": _stop_reason_rate(trajectories, StopReason.TRUNCATED),
        "num_failed": float(len(trajectories) - len(survivors)),
    }
    if survivors:
        metrics |= {
            "reward_mean": statistics.fmean([t.reward for t in survivors]),
            "turns": statistics.fmean([t.num_turns for t in survivors]),
            "tokens": statistics.fmean([t.num_generated_tokens for t in survivors]),
        }
    return metrics


def _stop_reason_rate(trajectories: Sequence[Trajectory], reason: StopReason) -> float:
    return sum(t.stop_reason is reason for t in trajectories) / len(trajectories)


def _count_failed(trajectories: Sequence[Trajectory], name: FailureClass) -> int:
    return sum(t.failure is not None and t.failure.failure_class is name for t in trajectories)
