"""Results of a step as JSON, for environments in processes of their own."""

from collections.abc import Mapping
from typing import Any

from nemo_rl.data.messages import parse_record, to_record
from nemo_rl.types import EnvStep, Failure, FailureClass


def step_to_record(result: EnvStep | Failure) -> dict[str, Any]:
    """Return the record of a result; its state must be JSON."""
    if isinstance(result, Failure):
        return {
            "failure_class": result.failure_class.value,
            "cause": result.cause,
            "origin": result.origin,
            "traceback": result.traceback,
        }
    return {
        "observation": [to_record(message, keeps_files=True) for message in result.observation],
        "rewards": dict(result.rewards),
        "done": result.done,
        "state": dict(result.state),
        "stop_strings": result.stop_strings,
        "answer": result.answer,
        "response_fault": result.response_fault,
        "policy": result.policy,
        "policy_rewards": {policy: dict(rewards) for policy, rewards in result.policy_rewards.items()},
    }


def parse_step(record: Mapping[str, Any]) -> EnvStep | Failure:
    """Parse a record of `step_to_record`; raises KeyError, TypeError or ValueError for any other record."""
    if "failure_class" in record:
        return Failure(
            FailureClass(record["failure_class"]),
            str(record["cause"]),
            str(record["origin"]),
            str(record["traceback"]),
        )
    stop_strings = record["stop_strings"]
    return EnvStep(
        observation=tuple(map(parse_record, record["observation"])),
        rewards=record["rewards"],
        done=record["done"] is True,
        state=record["state"],
        stop_strings=None if stop_strings is None else tuple(map(str, stop_strings)),
        answer=record["answer"],
        response_fault=record["response_fault"],
        policy=record["policy"],
        policy_rewards=record["policy_rewards"],
    )
