"""Rollouts by agents: a session, a run of the agent against it, its chains as a trajectory.

What an agent does wrong is a `Failure` of its own rollout. No session outlives its rollout.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nemo_rl.environments.boundary import RESPONSE_TRUNCATED, error_to_failure, find_reward_problem
from nemo_rl.experience.agents import AgentRuntime, SessionProvider
from nemo_rl.experience.rollouts import RolloutDependencies, RolloutJob, RolloutOptions
from nemo_rl.experience.supervision import StallWatchdog, cancel_all, gather_or_cancel
from nemo_rl.experience.turns import copy_state, request_seed, strip_tool_fields
from nemo_rl.gateway.sessions import CallFailureKind, Chain
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
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray

TrajectorySelection: TypeAlias = Literal["all", "longest"]


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
        task_name = job.prompt.task_name
        async with supervision.slot(task_name, max_concurrency[task_name]):
            trajectory = await run(job, supervision.watchdog)
        trajectory = await dependencies.scoring.score(trajectory, supervision.watchdog)
        dependencies.failure_log.record(trajectory)
        if options.progress is not None:
            options.progress(trajectory)
        return trajectory

    return tuple(await supervision.watchdog.guard(gather_or_cancel(alone(job) for job in jobs)))


@contextlib.asynccontextmanager
async def open_rollout_session(
    sessions: SessionProvider, job: RolloutJob, options: RolloutOptions, *, server: int | None = None
) -> AsyncIterator["SessionHandle"]:
    """Open a session that samples from the rollout's seed; it is abandoned after the block unless finished in it.

    `server`: one of the gateway's, for clients whose address is given; None: the one with the fewest sessions.
    """
    seed = request_seed(options.seed, job.epoch, job.prompt.prompt_id, job.generation_index, 0)
    handle = sessions.open_session(seed=seed, sampling=options.sampling, server=server, trains=options.trains)
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
    )


def validate_rewards(rewards: Mapping[str, float], answer: str | None) -> AgentResult | Failure:
    """Return the result with these rewards, or a Failure that names the one that is not a finite number."""
    numbers = {name: _to_number(value) for name, value in rewards.items()}
    if problem := find_reward_problem(numbers):
        return Failure(FailureClass.REWARD, problem)
    return AgentResult(numbers, answer)


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
    except (TypeError, ValueError):
        return value


def _version_range(versions: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the oldest and newest weights of several chains."""
    spans = list(versions)
    return (min(s[0] for s in spans), max(s[1] for s in spans)) if spans else (0, 0)


def _prompt_only_log(prompt: Prompt) -> MessageLog:
    """Return the log of a rollout without a response: its prompt as text alone."""
    return tuple(TokenizedMessage(message, ()) for message in prompt.messages)


async def run_agent_rollouts(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Run each job's agent, at most `max_concurrency` of each at once. Return trajectories in the order of `jobs`.

    Waits for agents and the environments that score them; unblocked by either's results. A failure is a trajectory;
    RolloutError is raised on a stall alone.
    """

    async def run(job: RolloutJob, watchdog: StallWatchdog) -> Trajectory:
        return await _AgentRollout(job, dependencies, options, watchdog).run()

    max_concurrency = {name: runtime.max_concurrency for name, runtime in dependencies.agents.items()}
    return await run_recorded_rollouts(jobs, dependencies, options, run, max_concurrency=max_concurrency)


@dataclass(frozen=True, slots=True)
class _AgentRunOutcome:
    """The outcome of an agent's run after its session is closed."""

    result: AgentResult | Failure
    recording: Recording = field(default_factory=Recording)
    posted: Mapping[str, float] = field(default_factory=dict)


class _AgentRollout:
    """One rollout: the agent, then its score."""

    def __init__(
        self, job: RolloutJob, dependencies: RolloutDependencies, options: RolloutOptions, watchdog: StallWatchdog
    ) -> None:
        self._job = job
        self._dependencies = dependencies
        self._options = options
        self._watchdog = watchdog
        self._runtime: AgentRuntime = dependencies.agents[job.prompt.task_name]

    async def run(self) -> Trajectory:
        clock = time.perf_counter
        started_at = clock()
        ended = await self._run_in_session()
        agent_s = clock() - started_at
        result = ended.result
        if isinstance(result, AgentResult):
            result = await self._resolve_rewards(result, ended, ended.recording.longest)
        total_s = clock() - started_at
        timings = Timings(agent_s, total_s - agent_s, total_s)
        selection = self._runtime.trajectory_selection
        return build_recorded_trajectory(self._job, result, ended.recording, timings, selection=selection)

    async def _run_in_session(self) -> _AgentRunOutcome:
        """Run the agent from the opening of its session to its close; no error of the agent is raised."""
        task_name, sessions = self._job.prompt.task_name, self._runtime.sessions
        try:
            async with open_rollout_session(sessions, self._job, self._options) as handle:
                with self._watchdog.waiting_for(f"agent {task_name}"):
                    outcome = await self._run_agent(handle)
                return _classify_outcome(outcome, await sessions.finish(handle))
        except Exception as error:  # the gateway: too many sessions, or this one ran into its time to live
            return _AgentRunOutcome(error_to_failure(error, FailureClass.INFRA, prefix="gateway"))

    async def _run_agent(self, handle: "SessionHandle") -> AgentResult | Exception:
        """Return what the agent returned or raised; a timeout and a cancellation from within count as raised."""
        prompt, timeout_s = self._job.prompt, self._runtime.timeout_s
        task = asyncio.ensure_future(self._runtime.agent.run(prompt, handle.base_url, handle.api_key))
        try:
            await asyncio.wait((task,), timeout=timeout_s)
            if not task.done():
                return TimeoutError(f"the agent did not end in {timeout_s:g} s")
            if task.cancelled():
                return RuntimeError("the agent was cancelled from within")
            return task.result()
        except Exception as error:  # the boundary to code of others
            return error
        finally:
            await cancel_all((task,))

    async def _resolve_rewards(
        self, result: AgentResult, ended: _AgentRunOutcome, longest: Chain | None
    ) -> AgentResult | Failure:
        """Return the result with its rewards: its own, else those posted, else those of its scoring environment."""
        if longest is None:
            return Failure(FailureClass.AGENT, "the agent ended without a model call that succeeded")
        trained = ended.recording.selected(self._runtime.trajectory_selection)
        rewards = result.rewards or ended.posted or mean_rewards(trained)
        scored_by = self._runtime.scored_by
        if not rewards and scored_by is not None:
            return await self._score_with_environment(result.answer, longest, scored_by)
        if not rewards and self._dependencies.scoring.by_task.get(self._job.prompt.task_name):
            return AgentResult({}, result.answer)  # its scorers will say
        if not rewards:
            if ended.recording.is_incomplete:
                return Failure(FailureClass.AGENT, "the agent ran out of room and gave no reward")
            cause = f"no reward returned or posted, and env.{self._job.prompt.task_name}.scored_by names no environment"
            return Failure(FailureClass.REWARD, cause)
        return validate_rewards(rewards, result.answer)

    async def _score_with_environment(
        self, answer: str | None, longest: Chain, environment: str
    ) -> AgentResult | Failure:
        conversation = tuple(strip_tool_fields(message.message) for message in longest.message_log)
        state = copy_state(dict(self._job.prompt.env_state)) | {RESPONSE_TRUNCATED: longest.is_truncated}
        with self._watchdog.waiting_for(f"environment {environment}"):
            (step,) = await self._dependencies.environments[environment].step([conversation], [state])
        if isinstance(step, Failure):
            return step
        return AgentResult(
            {name: float(value) for name, value in step.rewards.items()}, step.answer if answer is None else answer
        )


def _classify_outcome(outcome: AgentResult | Exception, finished: "FinishedSession") -> _AgentRunOutcome:
    """Return what an agent's run came to.

    The failure of the session's last call tells whose fault an agent's exception is: an engine's failure is
    infrastructure, and an agent that stops because no room is left is truncated like any other rollout.
    """
    if not isinstance(outcome, Exception):
        return _AgentRunOutcome(outcome, Recording(finished.chains), finished.rewards)
    kind = finished.last_failure.kind if finished.last_failure is not None else None
    ran_out_of_room = kind is CallFailureKind.CONTEXT_LENGTH and not isinstance(outcome, TimeoutError)
    if ran_out_of_room and finished.chains:
        return _AgentRunOutcome(AgentResult(), Recording(finished.chains, is_incomplete=True), finished.rewards)
    failure_class = FailureClass.INFRA if kind is CallFailureKind.ENGINE else FailureClass.AGENT
    return _AgentRunOutcome(error_to_failure(outcome, failure_class), Recording(finished.chains), finished.rewards)
