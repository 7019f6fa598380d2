"""The forms in which a NeMo Gym server takes a row at POST /run and replies.

Agents of nemo-gym 0.4 to 0.6 take the row itself. In 0.7 every agent is fronted by an environment server: a relay
(`legacy_agent`) passes rows on, others run typed episodes (nemo_gym/episode_types.py). A row of Gym's materialized form
is opened by data/nemo_gym_dataset.py: its input's fields, and its task's id under TASK_ID.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from nemo_rl.data.nemo_gym_dataset import TASK_ID
from nemo_rl.environments.nemo_gym.failures import find_row_failure, parse_episode_failure
from nemo_rl.environments.nemo_gym.reply import GymEpisodeFailed, GymInvalidReply, GymReply, parse_reply

ROUTING_KEYS = frozenset({"agent_ref", "task_source", "skills_ref"})  # not part of a task
ROUTING_PREFIX = "_ng_"
TASK_DATA = "task_data"  # a materialized task's container of fields that agents take at the top level
TASK_KEYS = ("task_id", "problem_id", "instance_id")  # keys of a row that name its task, first come first


@dataclass(frozen=True, slots=True)
class RolloutIdentity:
    """The names by which a stack knows a rollout."""

    rollout_id: str = field(default_factory=lambda: uuid4().hex)  # unique in the stack; letters, digits, ".", "_", "-"
    task_id: str = "row"  # task of rows that name none

    def capture_key(self, attempt: int) -> str:
        """Return the key under which Gym captures an attempt's calls of the model."""
        return f"{self.rollout_id}-a{attempt}" if attempt else self.rollout_id


@dataclass(frozen=True, slots=True)
class RunProtocol:
    """One form of POST /run."""

    takes_episodes: bool = False  # typed requests, else rows
    returns_episodes: bool = False  # typed responses, else the fields of the reply at the top level
    has_identity: bool = False  # requests carry the rollout's id and attempt
    mask_is_failure: bool = False  # `mask_sample` says that the reward is invalid

    def encode(self, server: str, row: Mapping[str, Any], identity: RolloutIdentity, attempt: int) -> dict[str, Any]:
        """Return the body of the request for attempt number `attempt`, from 0."""
        if self.takes_episodes:
            task_id = row.get(TASK_ID) or {"taskset": server, "task_id": _name_task(row, identity)}
            task_input = {
                name: value
                for name, value in row.items()
                if name not in ROUTING_KEYS and not name.startswith(ROUTING_PREFIX)
            }
            task = {"task_id": task_id, "task_input": task_input}
            return {"episode_id": {"rollout_id": identity.rollout_id, "attempt": attempt}, "task": task}
        row = _flatten(row)
        if not self.has_identity:
            return row
        return {**row, "_ng_rollout_id": identity.rollout_id} | ({"_ng_attempt_index": attempt} if attempt else {})

    def decode(self, body: object, sent: Mapping[str, Any]) -> GymReply:
        """Return the reply in the decoded body of a response to `sent`.

        Raises GymEpisodeFailed for a failure that it reports, GymInvalidReply if it violates the protocol.
        """
        if self.returns_episodes:
            body = _open_episode(body, sent)
        if isinstance(body, Mapping):
            failure = find_row_failure(body, mask_is_failure=self.mask_is_failure)
            if failure is not None:
                raise GymEpisodeFailed(failure)
        return parse_reply(body)


AGENT_PROTOCOL = RunProtocol()  # agents up to 0.6
RELAY_PROTOCOL = RunProtocol(has_identity=True, mask_is_failure=True)
EPISODE_PROTOCOL = RunProtocol(takes_episodes=True, returns_episodes=True, has_identity=True, mask_is_failure=True)
PROTOCOL_OF_ENVIRONMENT_SERVER: Mapping[str, RunProtocol] = {  # by implementation; others run typed episodes
    "legacy_agent": RELAY_PROTOCOL,
    "single_agent_turn_legacy": RunProtocol(takes_episodes=True, has_identity=True, mask_is_failure=True),
}


def _name_task(row: Mapping[str, Any], identity: RolloutIdentity) -> str:
    return next((str(row[key]) for key in TASK_KEYS if row.get(key) is not None), identity.task_id)


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as agents take it: a materialized task's data at the top level, and no task's id beside."""
    if TASK_ID not in row:
        return dict(row)
    fields = {name: value for name, value in row.items() if name not in (TASK_ID, TASK_DATA)}
    return {**fields, **row.get(TASK_DATA, {})}


def _open_episode(body: object, sent: Mapping[str, Any]) -> object:
    """Return the result of a typed response; raises GymEpisodeFailed for its failure."""
    if not isinstance(body, Mapping):
        raise GymInvalidReply(f"the reply must be an object, not {type(body).__name__}")
    for name, expected in (("episode_id", sent["episode_id"]), ("task_id", sent["task"]["task_id"])):
        if body.get(name) != expected:
            raise GymInvalidReply(f"{name} must be that of the request, {expected}, not {body.get(name)!r:.200}")
    result, failure = body.get("result"), body.get("failure")
    if (result is None) == (failure is None):
        raise GymInvalidReply("the reply must have either a result or a failure")
    if failure is None:
        return result
    if not isinstance(failure, Mapping):
        raise GymInvalidReply(f"failure must be an object, not {type(failure).__name__}")
    raise GymEpisodeFailed(parse_episode_failure(failure))
