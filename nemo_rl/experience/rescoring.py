"""Scores of recorded rollouts, read from a file and written with new outcomes."""

from collections.abc import AsyncIterator, Container, Iterable, Mapping
from itertools import islice
from typing import Any

from nemo_rl.data.messages import parse_record
from nemo_rl.errors import DataError
from nemo_rl.experience.scoring import Scoring
from nemo_rl.types import Failure, FailureClass, Prompt, StopReason, TokenizedMessage, Trajectory

CHUNK_SIZE = 256  # lines that are scored together
PromptKey = tuple[str, str]  # dataset, prompt id


async def rescore_rollouts(
    rows: Iterable[Mapping[str, Any]],
    prompts: Mapping[PromptKey, Prompt],
    scoring: Scoring,
    *,
    scorer_only_tasks: Container[str],
    stall_timeout_s: float,
) -> AsyncIterator[dict[str, Any]]:
    """Yield each row with the scores of its task's scorers, in order.

    A scorer's reward takes the place of the one of its name, other rewards stay. A rollout that failed for want of a
    reward is scored again if its task is one of `scorer_only_tasks`, whose rewards are those of scorers alone: the
    environment's part of a failed rollout is not stored. One that failed otherwise stays as it is. Raises DataError for
    a row whose prompt is not among `prompts`, or that is no rollout.
    """
    rows = iter(rows)
    while part := list(islice(rows, CHUNK_SIZE)):
        trajectories = [_to_unscored_trajectory(row, prompts, scoring, scorer_only_tasks) for row in part]
        results = await scoring.score_batch(trajectories, stall_timeout_s=stall_timeout_s)
        for row, trajectory in zip(part, results, strict=True):
            yield {**row, **_outcome_fields(trajectory)}


def _to_unscored_trajectory(
    row: Mapping[str, Any], prompts: Mapping[PromptKey, Prompt], scoring: Scoring, scorer_only_tasks: Container[str]
) -> Trajectory:
    """Return the row as a rollout without tokens and without the rewards that its scorers will give."""
    try:
        prompt = prompts.get((row["dataset"], row["prompt_id"]))
        if prompt is None:
            raise DataError(f"prompt {row['prompt_id']} is not in the dataset {row['dataset']!r} of the configuration")
        names = {weighted.name for weighted in scoring.by_task.get(prompt.task_name, ())}
        failure, stop_reason = _parse_failure(row, should_rescore=bool(names) and prompt.task_name in scorer_only_tasks)
        return Trajectory(
            prompt=prompt,
            group_id=row["group_id"],
            generation_index=row["generation_index"],
            message_log=tuple(TokenizedMessage(parse_record(message), ()) for message in row["messages"]),
            stop_reason=stop_reason,
            rewards={} if failure else {name: value for name, value in row["rewards"].items() if name not in names},
            answer=row["answer"],
            failure=failure,
            response_faults=tuple(row.get("response_faults", ())),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a line of a rollouts file: {type(error).__name__}: {error}") from error


def _parse_failure(row: Mapping[str, Any], *, should_rescore: bool) -> tuple[Failure | None, StopReason]:
    failure = row["failure"]
    if failure is None:
        return None, StopReason(row["stop_reason"])
    if failure["class"] == FailureClass.REWARD and should_rescore:
        return None, StopReason.DONE  # how it ended is not stored beside its failure
    return Failure(FailureClass(failure["class"]), failure["cause"]), StopReason.FAILED


def _outcome_fields(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "reward": None if failure else trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "failure": {"class": failure.failure_class, "cause": failure.cause} if failure else None,
        "stop_reason": trajectory.stop_reason,
        **({"response_faults": list(trajectory.response_faults)} if trajectory.response_faults else {}),
    }
