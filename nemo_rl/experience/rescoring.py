"""Stored rollouts with other rewards: their text goes to scorers again, nothing is generated.

Consumes the lines of a RolloutWriter, and the prompts that they came from; produces the same lines with new rewards.
"""

from collections.abc import AsyncIterator, Container, Iterable, Mapping
from itertools import islice
from typing import Any

from nemo_rl.errors import DataError
from nemo_rl.experience.scoring import Scoring
from nemo_rl.types import Failure, FailureClass, Message, Prompt, StopReason, TokenizedMessage, ToolCall, Trajectory

AT_ONCE = 256  # lines that are scored together

PromptKey = tuple[str, str]  # data set, prompt id


async def rescored(
    rows: Iterable[Mapping[str, Any]],
    prompts: Mapping[PromptKey, Prompt],
    scoring: Scoring,
    *,
    scored_alone: Container[str],
    stall_timeout_s: float,
) -> AsyncIterator[dict[str, Any]]:
    """Each row with the scores of its task's scorers, in order.

    A scorer's reward takes the place of the one of its name, other rewards stay. A rollout that failed for want of a
    reward is scored anew where its task is one of `scored_alone`, whose rewards are those of scorers alone: the
    environment's part of a failed rollout is not stored. One that failed otherwise stays as it is. Raises DataError for
    a row whose prompt is not among `prompts`, or that is no rollout.
    """
    rows = iter(rows)
    while part := list(islice(rows, AT_ONCE)):
        trajectories = [_unscored(row, prompts, scoring, scored_alone) for row in part]
        results = await scoring.scored_together(trajectories, stall_timeout_s=stall_timeout_s)
        for row, trajectory in zip(part, results, strict=True):
            yield {**row, **_outcome(trajectory)}


def _unscored(
    row: Mapping[str, Any], prompts: Mapping[PromptKey, Prompt], scoring: Scoring, scored_alone: Container[str]
) -> Trajectory:
    """The row as a rollout without tokens, and without the rewards that its scorers will give."""
    try:
        prompt = prompts.get((row["dataset"], row["prompt_id"]))
        if prompt is None:
            raise DataError(f"prompt {row['prompt_id']} is not in the data set {row['dataset']!r} of the configuration")
        names = {weighted.name for weighted in scoring.by_task.get(prompt.task_name, ())}
        failure, stop_reason = _failure(row, scored_anew=bool(names) and prompt.task_name in scored_alone)
        return Trajectory(
            prompt=prompt,
            group_id=row["group_id"],
            generation_index=row["generation_index"],
            message_log=tuple(TokenizedMessage(_message(message), ()) for message in row["messages"]),
            stop_reason=stop_reason,
            rewards={} if failure else {name: value for name, value in row["rewards"].items() if name not in names},
            answer=row["answer"],
            failure=failure,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a line of a rollouts file: {type(error).__name__}: {error}") from error


def _failure(row: Mapping[str, Any], *, scored_anew: bool) -> tuple[Failure | None, StopReason]:
    failure = row["failure"]
    if failure is None:
        return None, StopReason(row["stop_reason"])
    if failure["class"] == FailureClass.REWARD and scored_anew:
        return None, StopReason.DONE  # how it ended is not stored beside its failure
    return Failure(FailureClass(failure["class"]), failure["cause"]), StopReason.FAILED


def _message(row: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in row.get("tool_calls", ()))
    return Message(row["role"], row["content"], calls, row.get("tool_call_id"))


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "reward": None if failure else trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "failure": {"class": failure.failure_class, "cause": failure.cause} if failure else None,
        "stop_reason": trajectory.stop_reason,
    }
