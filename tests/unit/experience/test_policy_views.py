"""Rollouts of several policies: who speaks, what each earns, and what each is trained on."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_rl.environments.step_records import parse_step, step_to_record
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.policy_views import view_groups
from nemo_rl.experience.rollout_metrics import policy_reward_metrics
from nemo_rl.experience.rollout_rows import rollout_row
from nemo_rl.experience.turns import Episode
from nemo_rl.types import EnvStep, Failure, FailureClass, Message, StopReason, Trajectory, TrajectoryGroup
from tests.fakes.encoder import END
from tests.unit.experience.test_turns import GO_ON, PROMPT, RULES, episode, generation, respond

GAME = replace(RULES, speakers={"game": ("first", "second")})
TO_SECOND = replace(GO_ON, policy="second")


def played(**last: Any) -> Trajectory:
    """A game in which both policies have a turn."""
    e = episode(GAME)
    respond(e, 9, END)
    e.apply_env_step(TO_SECOND)
    respond(e, 8, 7, END)
    e.apply_env_step(EnvStep(**last))
    return e.trajectory()


def speaker(e: Episode) -> str:
    return generation(e).policy


def test_environment_says_which_policy_speaks() -> None:
    e = episode(replace(GAME, max_turns=4))
    assert speaker(e) == "first"
    for step, expected in ((TO_SECOND, "second"), (GO_ON, "second"), (replace(GO_ON, policy="first"), "first")):
        respond(e, 9, END)
        e.apply_env_step(step)
        assert speaker(e) == expected
    respond(e, 9, END)
    e.apply_env_step(EnvStep())
    spoke = [m.policy for m in e.trajectory().message_log if m.is_generated]
    assert spoke == ["first", "second", "second", "first"]


def test_policies_of_a_collection_are_asked_for_by_their_weight_versions() -> None:
    """Its engine holds each as a version of one adapter; in a run they are adapters of one version."""
    e = episode(replace(GAME, policy_versions={"first": 2, "second": 1}))
    asked = []
    for step in (TO_SECOND, EnvStep()):
        asked.append((generation(e).weight_version, generation(e).policy))
        respond(e, 9, END)
        e.apply_env_step(step)
    assert asked == [(2, ""), (1, "")]
    assert [m.policy for m in e.trajectory().message_log if m.is_generated] == ["first", "second"]


def test_policies_have_their_own_rewards_beside_those_of_all() -> None:
    trajectory = played(rewards={"fair": 0.25}, policy_rewards={"second": {"won": 1.0}, "first": {"won": -1.0}})
    assert trajectory.policy_rewards == {"first": {"fair": 0.25, "won": -1.0}, "second": {"fair": 0.25, "won": 1.0}}
    assert trajectory.reward == -0.75  # of the policy that speaks first
    assert policy_reward_metrics([trajectory, played(rewards={"fair": 0.75})]) == {
        "policies/first/reward_mean": 0.0,
        "policies/second/reward_mean": 1.0,
    }


def test_a_policy_without_a_turn_has_no_reward() -> None:
    e = episode(GAME)
    respond(e, 9, END)
    e.apply_env_step(EnvStep(policy_rewards={"first": {"won": 1.0}, "second": {"won": 0.0}}))
    assert e.trajectory().policy_rewards == {"first": {"won": 1.0}}


@pytest.mark.parametrize(
    ("step", "rules", "known"),
    [
        (replace(GO_ON, policy="third"), GAME, "first, second"),
        (EnvStep(policy_rewards={"third": {"won": 1.0}}), GAME, "first, second"),
        (TO_SECOND, RULES, "none: the run has a single policy"),
    ],
)
def test_other_policies_fail_the_rollout(step: EnvStep, rules: Any, known: str) -> None:
    e = episode(rules)
    respond(e, 9, END)
    e.apply_env_step(step)
    failure = e.trajectory().failure
    assert failure is not None
    assert failure.failure_class is FailureClass.ENVIRONMENT
    assert failure.cause.endswith(f"those of env.game.policies: {known}")


def test_a_rollout_cut_off_before_any_reward_has_it_for_all_who_spoke() -> None:
    e = episode(replace(GAME, max_turns=1, truncated_rewards={"game": -2.0}))
    respond(e, 9, END)
    e.apply_env_step(TO_SECOND)
    assert e.trajectory().stop_reason is StopReason.MAX_TURNS
    assert e.trajectory().policy_rewards == {"first": {"game": -2.0}}
    rewarded = episode(replace(GAME, max_turns=1, truncated_rewards={"game": -2.0}))
    respond(rewarded, 9, END)
    rewarded.apply_env_step(replace(TO_SECOND, policy_rewards={"first": {"won": 1.0}}))
    assert rewarded.trajectory().policy_rewards == {"first": {"won": 1.0}}


def test_each_policy_is_trained_on_its_own_tokens_and_rewards() -> None:
    one = played(policy_rewards={"first": {"won": 1.0}, "second": {"won": 0.0}})
    failed = replace(
        one,
        generation_index=2,
        rewards={},
        policy_rewards={},
        stop_reason=StopReason.FAILED,
        failure=Failure(FailureClass.INFRA, "down"),
    )
    e = episode(GAME)
    respond(e, 6, END)
    e.apply_env_step(EnvStep(policy_rewards={"first": {"won": 0.5}}))
    alone = e.trajectory()
    group = TrajectoryGroup("g", PROMPT, (one, replace(alone, generation_index=3), failed))
    for policy, masks, rewards in (
        ("first", [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]], [1.0, 0.5]),
        ("second", [[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]], [0.0]),
    ):
        (view,) = view_groups([group], policy, min_group_size=1)
        batch, _ = assemble_batch([view], min_group_size=1)
        lengths = batch["lengths"].tolist()
        found = [row[:length].tolist() for row, length in zip(batch["token_mask"], lengths, strict=True)]
        assert (found, batch["reward"].tolist()) == (masks, rewards)
        assert failed.generation_index in [t.generation_index for t in view.trajectories]
    assert view_groups([group], "second", min_group_size=2) == ()
    assert view_groups([group], "third", min_group_size=1) == ()


def test_records_name_the_policies() -> None:
    row = rollout_row(played(policy_rewards={"first": {"won": 1.0}, "second": {"won": 0.0}}))
    assert [message.get("policy") for message in row["messages"]] == [None, "first", None, "second"]
    assert row["policy_rewards"] == {"first": {"won": 1.0}, "second": {"won": 0.0}}
    assert row["rewards"] == {"won": 1.0}


def test_a_step_keeps_its_policies_on_the_way_from_another_process() -> None:
    step = EnvStep((Message("user", "go"),), policy="second", policy_rewards={"first": {"won": 1.0}}, done=False)
    assert parse_step(step_to_record(step)) == step
