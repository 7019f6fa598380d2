"""NeMo Gym's failures: one class for each kind, none a reward."""

from typing import Any

import pytest

from nemo_rl.environments.nemo_gym.failures import (
    CLASS_OF_KIND,
    CLASS_OF_STAGE,
    EpisodeFailure,
    find_row_failure,
    parse_episode_failure,
)
from nemo_rl.types import FailureClass
from tests.fakes.gym_vocabulary import KINDS, STAGES


def test_each_kind_and_stage_of_the_vocabulary_has_a_class() -> None:
    assert set(CLASS_OF_KIND) == KINDS
    assert set(CLASS_OF_STAGE) == STAGES
    assert {*CLASS_OF_KIND.values(), *CLASS_OF_STAGE.values()} == {
        FailureClass.INFRA,
        FailureClass.ENVIRONMENT,
        FailureClass.AGENT,
        FailureClass.REWARD,
    }


@pytest.mark.parametrize(
    ("kind", "stage", "expected"),
    [
        ("judge_failed", "agent", FailureClass.REWARD),  # the kind says more than the stage
        ("server:own_kind", "verification", FailureClass.REWARD),
        ("not_registered", "admission", FailureClass.INFRA),
        (None, "agent", FailureClass.AGENT),
        (None, "no_such_stage", FailureClass.ENVIRONMENT),
        (None, None, FailureClass.ENVIRONMENT),
    ],
)
def test_other_kinds_have_the_class_of_their_stage(kind: str | None, stage: str | None, expected: FailureClass) -> None:
    assert EpisodeFailure("why", kind, stage).failure_class is expected


def test_only_an_episode_turned_away_at_admission_may_be_sent_again() -> None:
    sent_again = [
        stage
        for stage in (None, *sorted(STAGES))
        if EpisodeFailure("", stage=stage, is_terminal=False).may_be_sent_again
    ]
    assert sent_again == ["admission"]
    assert not EpisodeFailure("", stage="admission", is_terminal=True).may_be_sent_again


@pytest.mark.parametrize(
    ("body", "mask_is_failure", "expected"),
    [
        ({"reward": 1.0, "failure_kind": None, "mask_sample": False}, True, None),
        ({"reward": 1.0, "failure_kind": "agent_timeout", "failure_reason": "slow"}, True, None),  # a diagnosis
        ({"reward": 0.0, "mask_sample": True}, False, None),  # before 0.7: without a gradient, in the baseline
        ({"reward": 0.0, "mask_sample": True}, True, ("masked", FailureClass.ENVIRONMENT)),
        ({"mask_sample": True, "failure_kind": "judge_failed"}, False, ("judge_failed", FailureClass.REWARD)),
        ({"instance_config": {"mask_sample": True}}, True, ("masked", FailureClass.ENVIRONMENT)),
        ({"_ng_failure_class": "agent_run_error"}, True, ("agent_run_error", FailureClass.AGENT)),
        (
            {"_ng_failure_class": "environment_server_failed", "_ng_failure_stage": "verification"},
            True,
            ("environment_server_failed", FailureClass.REWARD),
        ),
        ({"_ng_no_persist": True, "reward": 0.0}, True, ("kill_shaped", FailureClass.INFRA)),
    ],
)
def test_a_reply_fails_by_its_marks_and_not_by_its_reward(
    body: dict[str, Any], mask_is_failure: bool, expected: tuple[str, FailureClass] | None
) -> None:
    failure = find_row_failure(body, mask_is_failure=mask_is_failure)
    assert (failure and (failure.kind, failure.failure_class)) == expected


def test_the_text_of_a_failure_is_one_short_line_without_control_characters() -> None:
    failure = EpisodeFailure("a\n b\x1b[2J" + "x" * 10_000, "k\n" * 1000, "s\x07" * 1000)
    text = str(failure)
    assert len(text) < 1500
    assert text.isprintable()
    assert str(EpisodeFailure("judge is away", "judge_failed", "verification")) == (
        "judge_failed at stage verification: judge is away"
    )
    assert str(EpisodeFailure("")) == "failed: no reason given"


def test_fields_of_a_wrong_type_count_as_absent() -> None:
    failure = parse_episode_failure({"failure_reason": 3, "failure_kind": ["x"], "stage": {}, "terminal": "no"})
    assert failure == EpisodeFailure("", None, None, is_terminal=True)
