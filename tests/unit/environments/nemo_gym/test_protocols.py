"""The forms of POST /run: what is sent, and what counts as its reply."""

from typing import Any

import pytest

from nemo_rl.data.nemo_gym_dataset import TASK_ID
from nemo_rl.environments.nemo_gym.protocols import (
    AGENT_PROTOCOL,
    EPISODE_PROTOCOL,
    PROTOCOL_OF_ENVIRONMENT_SERVER,
    RELAY_PROTOCOL,
    RolloutIdentity,
)
from nemo_rl.environments.nemo_gym.reply import GymEpisodeFailed, GymInvalidReply
from nemo_rl.types import FailureClass

ROW = {"responses_create_params": {"input": "?"}, "agent_ref": {"name": "a"}, "_ng_task_index": 3, "answer": "B"}
IDENTITY = RolloutIdentity("r1", "p7")
RESULT = {"reward": 0.5, "response": {"output": []}, "mask_sample": False}
LEGACY_EPISODE_PROTOCOL = PROTOCOL_OF_ENVIRONMENT_SERVER["single_agent_turn_legacy"]


def test_a_row_goes_to_an_agent_as_it_is() -> None:
    assert AGENT_PROTOCOL.encode("a", ROW, IDENTITY, 2) == ROW


def test_a_relayed_row_carries_its_rollout_and_attempt() -> None:
    assert RELAY_PROTOCOL.encode("e", ROW, IDENTITY, 0) == {**ROW, "_ng_rollout_id": "r1"}
    assert RELAY_PROTOCOL.encode("e", ROW, IDENTITY, 2) == {**ROW, "_ng_rollout_id": "r1", "_ng_attempt_index": 2}


@pytest.mark.parametrize("protocol", [EPISODE_PROTOCOL, LEGACY_EPISODE_PROTOCOL])
def test_an_episode_has_the_rows_task_without_its_routing(protocol: Any) -> None:
    assert protocol.encode("e", ROW, IDENTITY, 2) == {
        "episode_id": {"rollout_id": "r1", "attempt": 2},
        "task": {
            "task_id": {"taskset": "e", "task_id": "p7"},
            "task_input": {"responses_create_params": {"input": "?"}, "answer": "B"},
        },
    }
    named = protocol.encode("e", {**ROW, "problem_id": 12, "instance_id": "x"}, IDENTITY, 0)
    assert named["task"]["task_id"]["task_id"] == "12"


TASK = {"taskset": "gpqa", "task_id": "7"}
OPENED = {"responses_create_params": {"input": "?"}, "task_data": {"answer": "B"}, "task_id": "flat", TASK_ID: TASK}


def test_a_materialized_task_keeps_its_id_and_its_input() -> None:
    task_input = {name: value for name, value in OPENED.items() if name != TASK_ID}
    assert EPISODE_PROTOCOL.encode("e", OPENED, IDENTITY, 0)["task"] == {"task_id": TASK, "task_input": task_input}


@pytest.mark.parametrize("protocol", [AGENT_PROTOCOL, RELAY_PROTOCOL])
def test_an_agent_gets_the_fields_of_a_materialized_task(protocol: Any) -> None:
    sent = protocol.encode("e", OPENED, IDENTITY, 0)
    sent.pop("_ng_rollout_id", None)
    assert sent == {"responses_create_params": {"input": "?"}, "answer": "B", "task_id": "flat"}


def test_rollouts_without_a_given_identity_have_names_of_their_own() -> None:
    assert RolloutIdentity().rollout_id != RolloutIdentity().rollout_id


def reply(**changes: Any) -> dict[str, Any]:
    sent = EPISODE_PROTOCOL.encode("e", ROW, IDENTITY, 0)
    return {"episode_id": sent["episode_id"], "task_id": sent["task"]["task_id"], "result": RESULT, **changes}


def decode(body: object) -> Any:
    return EPISODE_PROTOCOL.decode(body, EPISODE_PROTOCOL.encode("e", ROW, IDENTITY, 0))


def test_a_result_is_read_as_the_reply_of_an_agent() -> None:
    assert decode(reply(failure=None)).reward == 0.5
    assert LEGACY_EPISODE_PROTOCOL.decode(RESULT, {}).reward == 0.5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "the reply must be an object, not list"),
        (RESULT, "episode_id must be that of the request"),
        (reply(episode_id={"rollout_id": "r1", "attempt": 1}), "episode_id must be that of the request"),
        (reply(task_id={"taskset": "e", "task_id": "p8"}), "task_id must be that of the request"),
        (reply(result=None), "either a result or a failure"),
        (reply(failure={"failure_reason": "x", "terminal": True}), "either a result or a failure"),
        (reply(result=None, failure="broke"), "failure must be an object, not str"),
        (reply(result={"reward": 1.0}), "response must be an object, not missing"),
        (reply(result=[1]), "the reply must be an object, not list"),
    ],
)
def test_a_response_to_something_else_is_no_reply(body: Any, said: str) -> None:
    with pytest.raises(GymInvalidReply) as error:
        decode(body)
    assert said in str(error.value)


def test_failures_come_out_of_episodes_and_of_rows() -> None:
    with pytest.raises(GymEpisodeFailed) as episode:
        decode(
            reply(result=None, failure={"failure_reason": "away", "terminal": False, "failure_kind": "judge_failed"})
        )
    assert episode.value.failure_class is FailureClass.REWARD
    with pytest.raises(GymEpisodeFailed) as masked:
        decode(reply(result={**RESULT, "mask_sample": True, "failure_kind": "provider_oom_killed"}))
    assert masked.value.failure_class is FailureClass.ENVIRONMENT
    with pytest.raises(GymEpisodeFailed) as row:
        RELAY_PROTOCOL.decode({"_ng_failure_class": "agent_timeout", "error": "slow"}, {})
    assert (row.value.failure_class, str(row.value)) == (FailureClass.AGENT, "agent_timeout: slow")
    assert AGENT_PROTOCOL.decode({**RESULT, "mask_sample": True}, {}).mask_sample
