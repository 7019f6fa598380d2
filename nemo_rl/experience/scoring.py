"""The end of a rollout: the scores of whole conversations, requested as each one ends, while others still generate.

What fails a score fails the rollout, as reward failure: no score is ever taken for 0. A response that cannot be scored
is a wrong answer: it earns the lowest reward that its scorer has given in this run, at most 0.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from nemo_rl.experience.cancellation import gather_or_cancel
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.experience.turns import strip_tool_fields
from nemo_rl.interfaces import Scorer
from nemo_rl.types import Failure, ResponseFault, ScoreRequest, StopReason, Trajectory

ScoringTurn: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class WeightedScorer:
    """A scorer as a reward of its name."""

    name: str
    scorer: Scorer
    weight: float


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scorers of each task; their rewards add to the environment's.

    With a `turn` the scorers share the engine's device: nothing is scored while rollouts run, and all of them after
    the last one, inside `turn()`.
    """

    by_task: Mapping[str, Sequence[WeightedScorer]] = field(default_factory=dict)
    turn: ScoringTurn | None = None
    lowest: dict[str, float] = field(default_factory=dict, compare=False)  # lowest reward by scorer, at most 0

    def needs_scoring(self, trajectory: Trajectory) -> bool:
        """Return whether to score it as it ends: it did not fail, and its task has scorers that need not wait."""
        return self.turn is None and self._has_scorers(trajectory)

    async def score(self, trajectory: Trajectory, watchdog: StallWatchdog) -> Trajectory:
        """Return the trajectory with its scores; failed if one scorer has none for it.

        A trajectory without scorers is returned as it is. Each reward is `weight * score` under the scorer's name.
        """
        return await self._score_trajectory(trajectory, watchdog) if self.needs_scoring(trajectory) else trajectory

    async def score_batch(
        self, trajectories: Sequence[Trajectory], *, stall_timeout_s: float
    ) -> tuple[Trajectory, ...]:
        """Score the rollouts left for the scorers' turn, in order; raise RolloutError after a stall."""
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
        scores = await _gather_scores(scorers, request, watchdog)
        timings = replace(trajectory.timings, scoring_s=time.perf_counter() - started_at)
        return self._add_scores(replace(trajectory, timings=timings), scorers, scores)

    def _add_scores(
        self,
        trajectory: Trajectory,
        scorers: Sequence[WeightedScorer],
        scores: Sequence[float | Failure | ResponseFault],
    ) -> Trajectory:
        """Add `scores` to the rewards; the first failure among them fails the rollout."""
        rewards, faults = dict(trajectory.rewards), list(trajectory.response_faults)
        for weighted, score in zip(scorers, scores, strict=True):
            name, lowest = weighted.name, self.lowest.get(weighted.name, 0.0)
            if isinstance(score, Failure):
                failure = replace(score, cause=f"{name}: {score.cause}")
                return replace(
                    trajectory, rewards={}, policy_rewards={}, failure=failure, stop_reason=StopReason.FAILED
                )
            if isinstance(score, ResponseFault):
                faults.append(score.name)
                reward = lowest
            else:
                reward = weighted.weight * score
            self.lowest[name] = min(lowest, reward)
            rewards[name] = rewards.get(name, 0.0) + reward
        own = dict.fromkeys(trajectory.policy_rewards, rewards)  # scorers are refused if several policies speak
        return replace(trajectory, rewards=rewards, policy_rewards=own, response_faults=tuple(dict.fromkeys(faults)))


def make_score_request(trajectory: Trajectory) -> ScoreRequest:
    """Return the text of the conversation with the prompt's own state."""
    messages = tuple(strip_tool_fields(message.message) for message in trajectory.message_log)
    return ScoreRequest(messages, trajectory.prompt.env_state)


async def _gather_scores(
    scorers: Sequence[WeightedScorer], request: ScoreRequest, watchdog: StallWatchdog
) -> list[float | Failure | ResponseFault]:
    async def score(weighted: WeightedScorer) -> float | Failure | ResponseFault:
        with watchdog.waiting_for(f"scorer {weighted.name}"):
            return (await weighted.scorer.score([request]))[0]

    return await gather_or_cancel(map(score, scorers))
