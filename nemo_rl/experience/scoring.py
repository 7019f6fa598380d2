"""The end of a rollout: the scores of whole conversations, asked for as each one ends, while others still generate.

What fails a score fails the rollout, as reward failure: no score is ever taken for 0.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from nemo_rl.experience.supervision import StallWatchdog, in_parallel
from nemo_rl.experience.turns import role_and_content
from nemo_rl.interfaces import Scorer, ScoreRequest
from nemo_rl.types import Failure, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer as a reward of its name."""

    name: str
    scorer: Scorer
    weight: float


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which scorers reward the rollouts of which task; they add to what the environment gave.

    With a `turn` the scorers share the engine's device: nothing is scored while rollouts run, and all of them behind
    the last one, inside `turn()`.
    """

    by_task: Mapping[str, Sequence[WeightedScorer]] = field(default_factory=dict)
    turn: Callable[[], AbstractAsyncContextManager[None]] | None = None

    def needs(self, trajectory: Trajectory) -> bool:
        """Whether it is to be scored as it ends: it did not fail, and its task has scorers that need not wait."""
        return self.turn is None and self._has_scorers(trajectory)

    async def scored(self, trajectory: Trajectory, watchdog: StallWatchdog) -> Trajectory:
        """The trajectory with its scores, asked for at once; failed where one scorer has none for it.

        One that needs none is returned as it is. Each reward is `weight * score` under the scorer's name.
        """
        return await self._scored(trajectory, watchdog) if self.needs(trajectory) else trajectory

    async def scored_together(
        self, trajectories: Sequence[Trajectory], *, stall_timeout_s: float
    ) -> tuple[Trajectory, ...]:
        """What was left for the scorers' turn, in order; RolloutError when no score comes for `stall_timeout_s`."""
        if not any(map(self._has_scorers, trajectories)):
            return tuple(trajectories)
        watchdog = StallWatchdog(stall_timeout_s)

        async def one(trajectory: Trajectory) -> Trajectory:
            return await self._scored(trajectory, watchdog) if self._has_scorers(trajectory) else trajectory

        async with self.turn() if self.turn is not None else nullcontext():
            return tuple(await watchdog.guard(in_parallel(one(trajectory) for trajectory in trajectories)))

    def _has_scorers(self, trajectory: Trajectory) -> bool:
        return trajectory.failure is None and bool(self.by_task.get(trajectory.prompt.task_name))

    async def _scored(self, trajectory: Trajectory, watchdog: StallWatchdog) -> Trajectory:
        scorers, request = self.by_task[trajectory.prompt.task_name], score_request(trajectory)
        started_at = time.perf_counter()
        with watchdog.waiting_for("scorers"):
            scores = await _all_scores(scorers, request)
        timings = replace(trajectory.timings, scoring_s=time.perf_counter() - started_at)
        return with_scores(replace(trajectory, timings=timings), scorers, scores)


def score_request(trajectory: Trajectory) -> ScoreRequest:
    """The conversation in its text, and the prompt's own state."""
    messages = tuple(role_and_content(message.message) for message in trajectory.message_log)
    return ScoreRequest(messages, trajectory.prompt.env_state)


def with_scores(
    trajectory: Trajectory, scorers: Sequence[WeightedScorer], scores: Sequence[float | Failure]
) -> Trajectory:
    """The rewards with those of `scores`; the first failure among them fails the rollout."""
    rewards = dict(trajectory.rewards)
    for weighted, score in zip(scorers, scores, strict=True):
        if isinstance(score, Failure):
            failure = replace(score, cause=f"{weighted.name}: {score.cause}")
            return replace(trajectory, rewards={}, failure=failure, stop_reason=StopReason.FAILED)
        rewards[weighted.name] = rewards.get(weighted.name, 0.0) + weighted.weight * score
    return replace(trajectory, rewards=rewards)


async def _all_scores(scorers: Sequence[WeightedScorer], request: ScoreRequest) -> list[float | Failure]:
    results = await in_parallel(weighted.scorer.score([request]) for weighted in scorers)
    return [score for (score,) in results]
