"""Metrics of the rollouts of a step."""

from dataclasses import replace

from nemo_rl.experience.rollout_metrics import age_metrics, rollout_metrics
from nemo_rl.types import (
    Failure,
    FailureClass,
    Message,
    Prompt,
    StopReason,
    TokenizedMessage,
    Trajectory,
)


def context(num_tokens: int) -> TokenizedMessage:
    return TokenizedMessage(Message("user", ""), (1,) * num_tokens)


def sampled(num_tokens: int) -> TokenizedMessage:
    return TokenizedMessage(Message("assistant", ""), (1,) * num_tokens, (-1.0,) * num_tokens)


def rollout(log, reason: StopReason, rewards=None, *, turns: int = 1, task: str = "game", failure=None) -> Trajectory:
    return Trajectory(
        Prompt("p", task, ()), "g", 0, tuple(log), reason, rewards or {}, num_turns=turns, failure=failure
    )


def test_metrics_of_one_environment():
    metrics = rollout_metrics(
        [
            rollout([context(5), sampled(3), context(2), sampled(4)], StopReason.DONE, {"r": 1.0}, turns=2),
            rollout([context(5), sampled(8)], StopReason.TRUNCATED, {"r": 0.0}),
            rollout([context(5), sampled(1), context(1), sampled(1), context(0)], StopReason.MAX_TURNS, turns=2),
            rollout([context(50)], StopReason.FAILED, failure=Failure(FailureClass.INFRA, "x"), turns=0),
        ]
    )
    assert metrics == {
        "num_rollouts": 4,
        "baseline_reward/pct_0": 0,
        "baseline_reward/pct_1": 0,
        "baseline_reward/pct_mixed": 100,
        "failures/infra": 1,
        "failures/environment": 0,
        "failures/agent": 0,
        "failures/reward": 0,
        "failures/cancelled": 0,
        "failures/truncated": 0,
        "natural_termination_rate": 0.25,
        "truncation_rate": 0.25,
        "max_turns_reached_rate": 0.25,
        "total_turns": 5,
        "avg_turns_per_sample": 5 / 3,
        "max_turns_per_sample": 2,
        "mean_total_tokens_per_sample": (14 + 13 + 8) / 3,
        "mean_gen_tokens_per_sample": (7 + 8 + 2) / 3,
        "max_gen_tokens_per_sample": 8,
        "mean_env_tokens_per_sample": 1.0,
        "env/game/reward_mean": 1 / 3,
        "env/game/turns": 5 / 3,
        "env/game/tokens": 17 / 3,
        "env/game/truncation_rate": 0.25,
        "env/game/num_failed": 1,
    }


def test_groups_are_counted_by_their_mean_reward_without_failed_rollouts():
    def group(name, *rewards):
        given = [rollout([sampled(1)], StopReason.DONE, {"r": reward}) for reward in rewards]
        lost = rollout([], StopReason.FAILED, failure=Failure(FailureClass.INFRA, "x"))
        return [replace(each, group_id=name) for each in (*given, lost)]

    groups = (group("a", 0.0, 0.0), group("b", 1.0, 1.0), group("c", 1.0, 0.0), group("d", 0.0), group("e"))
    metrics = rollout_metrics([each for each_group in groups for each in each_group])
    found = {name: value for name, value in metrics.items() if name.startswith("baseline_reward/")}
    assert found == {"baseline_reward/pct_0": 50, "baseline_reward/pct_1": 25, "baseline_reward/pct_mixed": 25}


def test_named_rewards_are_shown_apart():
    metrics = rollout_metrics(
        [
            rollout([sampled(1)], StopReason.DONE, {"format": 0.5, "correct": 1.0}),
            rollout([sampled(1)], StopReason.DONE, {"format": 0.0}),
        ]
    )
    assert metrics["reward/format"] == 0.25
    assert metrics["reward/correct"] == 1.0
    assert metrics["env/game/reward_mean"] == 0.75


def test_response_faults_are_shares_of_all_rollouts():
    faulty = replace(rollout([sampled(1)], StopReason.DONE, {"r": 0.0}), response_faults=("verifier_timeout", "deep"))
    metrics = rollout_metrics([faulty, rollout([sampled(1)], StopReason.DONE), rollout([], StopReason.DONE), faulty])
    assert metrics["response_faults/verifier_timeout"] == metrics["response_faults/deep"] == 0.5
    assert metrics["env/game/reward_mean"] == 0.0


def test_several_environments_have_all_metrics_each():
    failure = Failure(FailureClass.ENVIRONMENT, "x")
    metrics = rollout_metrics(
        [
            rollout([sampled(1)], StopReason.DONE, {"r": 1.0}, task="game"),
            rollout([sampled(3)], StopReason.DONE, {"r": 0.0}, task="math"),
            rollout([], StopReason.FAILED, task="tools", failure=failure),
        ]
    )
    assert (metrics["env/game/reward_mean"], metrics["env/math/reward_mean"]) == (1.0, 0.0)
    assert metrics["env/math/mean_gen_tokens_per_sample"] == 3
    assert metrics["env/tools/failures/environment"] == 1
    assert "env/tools/reward_mean" not in metrics


def test_agents_of_nemo_gym_are_environments_of_their_own():
    deal, ask = (
        replace(rollout([sampled(n)], StopReason.DONE, {"r": r}), prompt=Prompt("p", "nemo_gym", (), agent_name=agent))
        for agent, n, r in (("blackjack", 3, 1.0), ("mcqa", 5, 0.5))
    )
    failed = rollout([], StopReason.FAILED, task="math", failure=Failure(FailureClass.AGENT, "x"))
    metrics = rollout_metrics([deal, ask, failed])
    assert (metrics["env/blackjack/reward_mean"], metrics["env/mcqa/reward_mean"]) == (1.0, 0.5)
    assert (metrics["env/blackjack/tokens"], metrics["env/mcqa/tokens"]) == (3, 5)
    assert (metrics["env/math/num_failed"], metrics["env/mcqa/num_failed"]) == (1, 0)
    assert metrics["env/math/failures/agent"] == 1
    assert not any(name.startswith("env/nemo_gym") for name in metrics)


def test_no_rollouts_have_no_metrics():
    assert rollout_metrics([]) == {}


def test_age_counts_from_the_oldest_weights_of_rollouts_that_did_not_fail():
    done = rollout([sampled(1)], StopReason.DONE)
    failed = rollout([], StopReason.FAILED, failure=Failure(FailureClass.INFRA, "x"))
    rollouts = [replace(done, weight_versions=(3, 7)), replace(done, weight_versions=(6, 7)), failed]
    assert age_metrics(rollouts, weight_version=7) == {"avg_trajectory_age": 2.5, "max_trajectory_age": 4.0}
    assert age_metrics([failed], weight_version=7) == {}
