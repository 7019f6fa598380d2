"""Rollouts by agents: a session, a run of the agent against it, its chains as a trajectory.

What an agent does wrong is a `Failure` of its own rollout. No session outlives its rollout.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nemo_rl.environments.boundary import RESPONSE_TRUNCATED, error_to_failure, find_fault_problem
from nemo_rl.environments.states import copy_state
from nemo_rl.experience.agent_runtime import AgentRuntime
from nemo_rl.experience.cancellation import cancel_all
from nemo_rl.experience.recorded_rollouts import (
    Recording,
    build_recorded_trajectory,
    mean_rewards,
    open_rollout_session,
    run_recorded_rollouts,
    validate_rewards,
)
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.experience.turns import (
    TRUNCATED_BEFORE_REWARD,
    RolloutJob,
    strip_tool_fields,
    truncated_failure,
)
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.sessions import CallFailureKind, Chain
from nemo_rl.types import AgentResult, Failure, FailureClass, Timings, Trajectory

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray

logger = logging.getLogger(__name__)


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
        result, recording = ended.result, ended.recording
        if isinstance(result, AgentResult):
            result = await self._resolve_rewards(result, ended, recording.longest)
        if self._runtime.scored_by is not None:
            recording = recording.without_rewards()
        total_s = clock() - started_at
        timings = Timings(agent_s, total_s - agent_s, total_s)
        selection = self._runtime.trajectory_selection
        return build_recorded_trajectory(self._job, result, recording, timings, selection=selection)

    async def _run_in_session(self) -> _AgentRunOutcome:
        """Run the agent from the opening of its session to its close; no error of the agent is raised."""
        task_name, sessions = self._job.prompt.task_name, self._runtime.sessions
        try:
            is_side_call = self._runtime.is_side_call
            async with open_rollout_session(sessions, self._job, self._options, is_side_call=is_side_call) as handle:
                with self._watchdog.waiting_for(f"agent {task_name}"):
                    outcome = await self._run_agent(handle)
                failure = self._reward_calls(handle, outcome)
                ended = _classify_outcome(outcome, await sessions.finish(handle), is_harness=self._runtime.is_harness)
                return ended if failure is None else replace(ended, result=failure)
        except Exception as error:  # the gateway: too many sessions, or this one ran into its time to live  # noqa: BLE001
            return _AgentRunOutcome(error_to_failure(error, FailureClass.INFRA, prefix="gateway"))

    async def _run_agent(self, handle: "SessionHandle") -> AgentResult | Exception:
        """Return the agent's result or exception; a timeout and a cancellation from within count as exceptions."""
        prompt, timeout_s = self._job.prompt, self._runtime.timeout_s
        task = asyncio.ensure_future(self._runtime.agent.run(prompt, handle.base_url, handle.api_key))
        try:
            await asyncio.wait((task,), timeout=timeout_s)
            if not task.done():
                return TimeoutError(f"the agent did not end in {timeout_s:g} s")
            if task.cancelled():
                return RuntimeError("the agent was cancelled from within")
            return task.result()
        except Exception as error:  # the boundary to code of others  # noqa: BLE001
            return error
        finally:
            await cancel_all((task,))

    def _reward_calls(self, handle: "SessionHandle", outcome: AgentResult | Exception) -> Failure | None:
        """Store the agent's rewards of single calls in its session; return a Failure for one that is invalid."""
        if isinstance(outcome, Exception) or not outcome.call_rewards or self._runtime.scored_by is not None:
            return None
        if not isinstance(outcome.call_rewards, Mapping):
            problem = f"call_rewards are {outcome.call_rewards!r:.80}, not rewards by completion id"
            return Failure(FailureClass.REWARD, problem)
        checked: dict[str, Mapping[str, float]] = {}
        for completion_id, rewards in outcome.call_rewards.items():
            result = validate_rewards(AgentResult(rewards), self._runtime.reward_range)
            if isinstance(result, Failure):
                return result
            checked[completion_id] = result.rewards
        try:
            self._runtime.sessions.reward_calls(handle, checked)
        except RequestError as error:
            return Failure(FailureClass.REWARD, f"call_rewards: {error}")
        return None

    async def _resolve_rewards(
        self, result: AgentResult, ended: _AgentRunOutcome, longest: Chain | None
    ) -> AgentResult | Failure:
        """Return the result with its rewards: those of its scoring environment, else its own, else those posted."""
        if longest is None:
            return Failure(FailureClass.AGENT, "the agent ended without a model call that succeeded")
        if problem := find_fault_problem(result.response_fault):
            return Failure(FailureClass.AGENT, problem)
        trained = ended.recording.selected(self._runtime.trajectory_selection)
        rewards = result.rewards or ended.posted or mean_rewards(trained)
        if self._runtime.scored_by is not None:
            self._log_ignored({*rewards, *(["call_rewards"] if result.call_rewards else ())})
            return await self._score_with_environment(result, longest, self._runtime.scored_by)
        if not rewards and self._dependencies.scoring.by_task.get(self._job.prompt.task_name):
            return result  # its scorers will say
        if not rewards:
            if ended.recording.is_incomplete:
                return self._truncated_result(result.answer)
            cause = f"no reward returned or posted, and env.{self._job.prompt.task_name}.scored_by names no environment"
            return Failure(FailureClass.REWARD, cause)
        if problem := next(filter(None, (self._runtime.reward_range.find_problem(c.rewards) for c in trained)), None):
            return Failure(FailureClass.REWARD, problem)
        return validate_rewards(replace(result, rewards=rewards), self._runtime.reward_range)

    def _truncated_result(self, answer: str | None) -> AgentResult | Failure:
        """Return the result of an agent that ran out of room and gave no reward."""
        task = self._job.prompt.task_name
        reward = self._dependencies.truncated_rewards.get(task, 0.0)
        return (
            truncated_failure(task) if reward is None else AgentResult({task: reward}, answer, TRUNCATED_BEFORE_REWARD)
        )

    def _log_ignored(self, names: set[str]) -> None:
        """Log each name of a reward that the agent gives although an environment scores it, once."""
        if unlogged := sorted(names - self._runtime.ignored_rewards):
            self._runtime.ignored_rewards.update(unlogged)
            key = f"env.{self._job.prompt.task_name}.scored_by"
            logger.warning("ignoring rewards %s of an agent: only %s rewards it", unlogged, key)

    async def _score_with_environment(
        self, result: AgentResult, longest: Chain, environment: str
    ) -> AgentResult | Failure:
        conversation = tuple(strip_tool_fields(message.message) for message in longest.message_log)
        state = copy_state(dict(self._job.prompt.env_state)) | {RESPONSE_TRUNCATED: longest.is_truncated}
        with self._watchdog.waiting_for(f"environment {environment}"):
            (step,) = await self._dependencies.environments[environment].step([conversation], [state])
        if isinstance(step, Failure):
            return step
        return AgentResult(
            {name: float(value) for name, value in step.rewards.items()},
            step.answer if result.answer is None else result.answer,
            response_fault=step.response_fault or result.response_fault,
        )


def _classify_outcome(
    outcome: AgentResult | Exception, finished: "FinishedSession", *, is_harness: bool
) -> _AgentRunOutcome:
    """Return the outcome of an agent's run.

    The failure of the session's last call tells whose fault an agent's exception is: an engine's failure is
    infrastructure, and an agent that stops because no room is left is truncated like any other. A harness whose last
    call the engine failed has not finished, whatever its exit status.
    """
    last = finished.last_failure
    kind = last.kind if last is not None else None
    if not isinstance(outcome, Exception):
        result: AgentResult | Failure = outcome
        if is_harness and last and kind is CallFailureKind.ENGINE and not last.is_side_call:
            result = Failure(FailureClass.INFRA, f"the harness's last call failed: {last.cause}")
        return _AgentRunOutcome(result, Recording(finished.chains), finished.rewards)
    ran_out_of_room = kind is CallFailureKind.CONTEXT_LENGTH and not isinstance(outcome, TimeoutError)
    if ran_out_of_room and finished.chains:
        return _AgentRunOutcome(AgentResult(), Recording(finished.chains, is_incomplete=True), finished.rewards)
    failure_class = FailureClass.INFRA if kind is CallFailureKind.ENGINE else FailureClass.AGENT
    return _AgentRunOutcome(error_to_failure(outcome, failure_class), Recording(finished.chains), finished.rewards)
