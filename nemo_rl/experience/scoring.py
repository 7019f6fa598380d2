"""The end of a rollout: the scores of whole conversations, requested as each one ends, while others still generate.

What fails a score fails the rollout, as reward failure: no score is ever taken for 0.
"""

import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from nemo_rl.data.messages import parse_record
from nemo_rl.errors import DataError
from nemo_rl.experience.supervision import StallWatchdog, gather_or_cancel
from nemo_rl.experience.turns import strip_tool_fields
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.types import Failure, FailureClass, Prompt, StopReason, TokenizedMessage, Trajectory


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer as a reward of its name."""

    name: str
    scorer: Scorer
    weight: float


ScoringTurn: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which scorers reward the rollouts of which task; they add to what the environment gave.

    With a `turn` the scorers share the engine's device: nothing is scored while rollouts run, and all of them after
    the last one, inside `turn()`.
    """

    by_task: Mapping[str, Sequence[WeightedScorer]] = field(default_factory=dict)
    turn: ScoringTurn | None = None

    def needs_scoring(self, trajectory: Trajectory) -> bool:
        """Return whether to score it as it ends: it did not fail, and its task has scorers that need not wait."""
        return self.turn is None and self._has_scorers(trajectory)

    async def score(self, trajectory: Trajectory, watchdog: StallWatchdog) -> Trajectory:
        """Return the trajectory with its scores; failed if one scorer has none for it.

        One that needs none is returned as it is. Each reward is `weight * score` under the scorer's name.
        """
        return await self._score_trajectory(trajectory, watchdog) if self.needs_scoring(trajectory) else trajectory

    async def score_batch(
        self, trajectories: Sequence[Trajectory], *, stall_timeout_s: float
    ) -> tuple[Trajectory, ...]:
        """Score what was left for the scorers' turn, in order; raise RolloutError on a stall of `stall_timeout_s`."""
        if not any(map(self._has_scorers, trajectories)):
            return tuple(trajectories)
        watchdog = StallWatchdog(stall_timeout_s)

        async def one(trajectory: Trajectory) -> Trajectory:
            return await self._score_trajectory(trajectory, watchdog) if self._has_scorers(trajectory) else trajectory

        async with self.turn() if self.turn is not None else nullcontext():
            return tuple(await watchdog.guard(gather_or_cancel(one(trajectory) for trajectory in trajectories)))

    def _has_scorers(self, trajectory: Trajectory) -> bool:
        return trajectory.failure is None and bool(self.by_task.get(trajectory.prompt.task_name))

    async def _score_trajectory(self, trajectory: Trajectory, watchdog: StallWatchdog) -> Trajectory:
        scorers, request = self.by_task[trajectory.prompt.task_name], make_score_request(trajectory)
        started_at = time.perf_counter()
        with watchdog.waiting_for("scorers"):
            scores = await _gather_scores(scorers, request)
        timings = replace(trajectory.timings, scoring_s=time.perf_counter() - started_at)
        return add_scores(replace(trajectory, timings=timings), scorers, scores)


def make_score_request(trajectory: Trajectory) -> ScoreRequest:
    """Return the text of the conversation with the prompt's own state."""
    messages = tuple(strip_tool_fields(message.message) for message in trajectory.message_log)
    return ScoreRequest(messages, trajectory.prompt.env_state)


def add_scores(
    trajectory: Trajectory, scorers: Sequence[WeightedScorer], scores: Sequence[float | Failure]
) -> Trajectory:
    """Add `scores` to the rewards; the first failure among them fails the rollout."""
    rewards = dict(trajectory.rewards)
    for weighted, score in zip(scorers, scores, strict=True):
        if isinstance(score, Failure):
            failure = replace(score, cause=f"{weighted.name}: {score.cause}")
            return replace(trajectory, rewards={}, failure=failure, stop_reason=StopReason.FAILED)
        rewards[weighted.name] = rewards.get(weighted.name, 0.0) + weighted.weight * score
    return replace(trajectory, rewards=rewards)


async def _gather_scores(scorers: Sequence[WeightedScorer], request: ScoreRequest) -> list[float | Failure]:
    results = await gather_or_cancel(weighted.scorer.score([request]) for weighted in scorers)
    return [score for (score,) in results]


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
    reward is scored again where its task is one of `scorer_only_tasks`, whose rewards are those of scorers alone: the
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
    }
