"""Rollouts whose tokens the gateway records, by agents and by NeMo Gym: a session, its chains, a trajectory."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemo_rl.environments.boundary import find_reward_problem
from nemo_rl.experience.agent_runtime import RewardRange, SessionProvider, TrajectorySelection
from nemo_rl.experience.cancellation import gather_or_cancel
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_spans import begin_rollout_span, end_rollout_span
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.experience.turns import RolloutJob, request_seed
from nemo_rl.gateway.sessions import Chain
from nemo_rl.gateway.side_calls import SideCallTest
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


async def run_recorded_rollouts(
    jobs: Sequence[RolloutJob],
    dependencies: RolloutDependencies,
    options: RolloutOptions,
    run: Callable[[RolloutJob, StallWatchdog], Awaitable[Trajectory]],
    *,
    max_concurrency: Mapping[str, int],
) -> tuple[Trajectory, ...]:
    """Run all jobs at once, at most `max_concurrency` of each task in the whole run.

    Returns trajectories in the order of `jobs`. A failure is a trajectory; RolloutError is raised on a stall alone.
    """
    supervision = dependencies.supervision

    async def alone(job: RolloutJob) -> Trajectory:
        task_name, span = job.prompt.task_name, begin_rollout_span(job)
        try:
            with span.current():
                async with supervision.slot(task_name, max_concurrency[task_name]):
                    trajectory = await run(job, supervision.watchdog)
                trajectory = await dependencies.scoring.score(trajectory, supervision.watchdog)
            end_rollout_span(span, trajectory)
        finally:
            span.end()  # the rollout was cancelled
        dependencies.failure_log.record(trajectory)
        if options.progress is not None:
            options.progress(trajectory)
        return trajectory

    return tuple(await supervision.watchdog.guard(gather_or_cancel(alone(job) for job in jobs)))


@contextlib.asynccontextmanager
async def open_rollout_session(
    sessions: SessionProvider,
    job: RolloutJob,
    options: RolloutOptions,
    *,
    server: int | None = None,
    is_side_call: SideCallTest | None = None,
) -> AsyncIterator["SessionHandle"]:
    """Open a session that samples from the rollout's seed; it is abandoned after the block unless finished in it.

    `server`: one of the gateway's, for clients whose address is given; None: the one with the fewest sessions.
    """
    seed = request_seed(options.seed, job, 0)
    handle = sessions.open_session(
        seed=seed,
        sampling=job.sampling_of(options.sampling),
        server=server,
        trains=options.trains,
        is_side_call=is_side_call,
    )
    try:
        yield handle
    finally:
        with contextlib.suppress(Exception):
            await sessions.abandon(handle)


@dataclass(frozen=True, slots=True)
class Recording:
    """The record of a rollout after its session is closed."""

    chains: tuple[Chain, ...] = ()
    is_incomplete: bool = False  # known from elsewhere than the longest chain's last response
    loss_weight: float = 1.0

    @property
    def longest(self) -> Chain | None:
        """Return the chain of most tokens; of equal ones the last."""
        return max(
            reversed(self.chains), key=lambda chain: sum(len(m.token_ids) for m in chain.message_log), default=None
        )

    def selected(self, selection: TrajectorySelection) -> tuple[Chain, ...]:
        """Return the chains that are trained on."""
        longest = self.longest
        return self.chains if selection == "all" or longest is None else (longest,)

    def without_rewards(self) -> "Recording":
        """Return the record without the rewards of single chains."""
        return replace(self, chains=tuple(replace(chain, rewards={}) for chain in self.chains))

    @property
    def is_truncated(self) -> bool:
        return self.is_incomplete or (self.longest is not None and self.longest.is_truncated)


def build_recorded_trajectory(
    job: RolloutJob,
    result: AgentResult | Failure,
    recording: Recording,
    timings: Timings,
    *,
    selection: TrajectorySelection,
) -> Trajectory:
    """Build the trajectory: the longest chain as message log, the others beside it if `selection` is "all"."""
    longest = recording.longest
    failure = result if isinstance(result, Failure) else None
    # the longest first, the others in order
    chains = tuple(sorted(recording.selected(selection), key=lambda chain: chain is not longest))
    stop_reason = StopReason.TRUNCATED if recording.is_truncated else StopReason.DONE
    return Trajectory(
        prompt=job.prompt,
        group_id=job.group_id,
        generation_index=job.generation_index,
        message_log=longest.message_log if longest else _prompt_only_log(job.prompt),
        stop_reason=StopReason.FAILED if failure else stop_reason,
        rewards=result.rewards if isinstance(result, AgentResult) else {},
        answer=result.answer if isinstance(result, AgentResult) else None,
        num_turns=sum(message.is_generated for message in longest.message_log) if longest else 0,
        weight_versions=_version_range(chain.weight_versions for chain in chains),
        failure=failure,
        timings=timings,
        other_chains=tuple(chain.message_log for chain in chains[1:]),
        loss_weight=recording.loss_weight,
        chain_rewards=tuple(chain.rewards for chain in chains) if any(chain.rewards for chain in chains) else (),
        response_faults=(result.response_fault,) if isinstance(result, AgentResult) and result.response_fault else (),
    )


def validate_rewards(result: AgentResult, reward_range: RewardRange) -> AgentResult | Failure:
    """Return the result, or a Failure that names the reward that is not a number within the range."""
    if not isinstance(result.rewards, Mapping):
        return Failure(FailureClass.REWARD, f"rewards are {result.rewards!r:.80}, not numbers by name")
    rewards = {name: _to_number(value) for name, value in result.rewards.items()}
    problem = find_reward_problem(rewards) or reward_range.find_problem(rewards)
    if problem is not None:
        return Failure(FailureClass.REWARD, problem)
    return replace(result, rewards=rewards)


def mean_rewards(chains: Sequence[Chain]) -> dict[str, float]:
    """Return the mean of each named reward over the chains that have it.

    Example: chains with {"a": 1, "b": 1}, {"a": 0} and {} give {"a": 0.5, "b": 1}.
    """
    values: dict[str, list[float]] = {}
    for chain in chains:
        for name, reward in chain.rewards.items():
            values.setdefault(name, []).append(reward)
    return {name: sum(each) / len(each) for name, each in values.items()}


def _to_number(value: Any) -> Any:
    """Return the value as a float if it can be one: agents reward with NumPy scalars and booleans, too."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _version_range(versions: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the oldest and newest weights of several chains."""
    spans = list(versions)
    return (min(s[0] for s in spans), max(s[1] for s in spans)) if spans else (0, 0)


def _prompt_only_log(prompt: Prompt) -> MessageLog:
    """Return the log of a rollout without a response: its prompt as text alone."""
    return tuple(TokenizedMessage(message, ()) for message in prompt.messages)
