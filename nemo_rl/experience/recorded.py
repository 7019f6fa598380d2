"""Rollouts that others run and the gateway records: what those of agents and of NeMo Gym have in common.

Each has a session that samples from its own seed and does not outlive it; the session's chains become its trajectory.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from nemo_rl.experience.agents import Sessions
from nemo_rl.experience.rollouts import RolloutContext, RolloutJob
from nemo_rl.experience.supervision import StallWatchdog, Supervision, in_parallel
from nemo_rl.experience.turns import problem_of_rewards, request_seed
from nemo_rl.gateway.sessions import Chain
from nemo_rl.types import (
    AgentResult,
    Failure,
    FailureClass,
    MessageLog,
    Prompt,
    StopReason,
    Timings,
    TokenizedMessage,
    Trajectory,
)

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import SessionHandle  # loads Ray

Selection: TypeAlias = Literal["all", "longest"]


async def run_each(
    jobs: Sequence[RolloutJob],
    context: RolloutContext,
    run: Callable[[RolloutJob, StallWatchdog], Awaitable[Trajectory]],
    *,
    max_concurrency: Mapping[str, int],
) -> tuple[Trajectory, ...]:
    """All jobs at once, at most `max_concurrency` of each task. Trajectories in the order of `jobs`.

    A failure is a trajectory; RolloutError is raised on a stall alone.
    """
    supervision = context.supervision or Supervision(context.limits.stall_timeout_s)

    async def alone(job: RolloutJob) -> Trajectory:
        task_name = job.prompt.task_name
        async with supervision.room(task_name, max_concurrency[task_name]):
            trajectory = await run(job, supervision.watchdog)
        trajectory = await context.scoring.scored(trajectory, supervision.watchdog)
        if context.progress is not None:
            context.progress(trajectory)
        return trajectory

    return tuple(await supervision.watchdog.guard(in_parallel(alone(job) for job in jobs)))


@contextlib.asynccontextmanager
async def rollout_session(
    sessions: Sessions, job: RolloutJob, context: RolloutContext, *, server: int | None = None
) -> AsyncIterator["SessionHandle"]:
    """A session that samples from the rollout's seed; forgotten behind the block where it was not finished in it.

    `server`: one of the gateway's, for clients whose address is given; None: the one with the fewest sessions.
    """
    seed = request_seed(context.seed, job.epoch, job.prompt.prompt_id, job.generation_index, 0)
    handle = sessions.open_session(seed=seed, sampling=context.sampling, server=server)
    try:
        yield handle
    finally:
        with contextlib.suppress(Exception):
            await sessions.abandon(handle)


@dataclass(frozen=True, slots=True)
class Recording:
    """What is left of a rollout when its session is closed."""

    chains: tuple[Chain, ...] = ()
    is_cut: bool = False  # known from elsewhere than the longest chain's last response
    loss_weight: float = 1.0

    @property
    def longest(self) -> Chain | None:
        """The chain of most tokens; of equal ones the last."""
        return max(
            reversed(self.chains), key=lambda chain: sum(len(m.token_ids) for m in chain.message_log), default=None
        )

    @property
    def is_truncated(self) -> bool:
        return self.is_cut or (self.longest is not None and self.longest.is_truncated)


def recorded_trajectory(
    job: RolloutJob, result: AgentResult | Failure, recording: Recording, timings: Timings, *, selection: Selection
) -> Trajectory:
    """The longest chain as message log, the others beside it where `selection` is "all"."""
    longest = recording.longest
    failure = result if isinstance(result, Failure) else None
    chains = recording.chains if selection == "all" else (longest,) if longest else ()
    stop_reason = StopReason.TRUNCATED if recording.is_truncated else StopReason.DONE
    return Trajectory(
        prompt=job.prompt,
        group_id=job.group_id,
        generation_index=job.generation_index,
        message_log=longest.message_log if longest else _unanswered(job.prompt),
        stop_reason=StopReason.FAILED if failure else stop_reason,
        rewards=result.rewards if isinstance(result, AgentResult) else {},
        answer=result.answer if isinstance(result, AgentResult) else None,
        num_turns=sum(message.is_generated for message in longest.message_log) if longest else 0,
        weight_versions=_span(chain.weight_versions for chain in chains),
        failure=failure,
        timings=timings,
        other_chains=tuple(chain.message_log for chain in chains if chain is not longest),
        loss_weight=recording.loss_weight,
    )


def rewarded(rewards: Mapping[str, float], answer: str | None) -> AgentResult | Failure:
    """The result of these rewards, or which of them is no finite number."""
    if problem := problem_of_rewards(rewards):
        return Failure(FailureClass.REWARD, problem)
    return AgentResult({name: float(value) for name, value in rewards.items()}, answer)


def _span(versions: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The oldest and newest weights of several chains."""
    spans = list(versions)
    return (min(s[0] for s in spans), max(s[1] for s in spans)) if spans else (0, 0)


def _unanswered(prompt: Prompt) -> MessageLog:
    """A rollout without a single response: its prompt as text alone."""
    return tuple(TokenizedMessage(message, ()) for message in prompt.messages)
