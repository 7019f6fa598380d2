"""Rollouts by agents: a session, a run of the agent against it, its chains as a trajectory.

What an agent does wrong is a `Failure` of its own rollout. No session outlives its rollout.
"""

import asyncio
import copy
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_rl.environments.contract import RESPONSE_TRUNCATED
from nemo_rl.errors import summarize_error
from nemo_rl.experience.agents import AgentRuntime
from nemo_rl.experience.boundaries import step_environment
from nemo_rl.experience.recorded import Recording, recorded_trajectory, rewarded, rollout_session, run_each
from nemo_rl.experience.rollouts import RolloutContext, RolloutJob
from nemo_rl.experience.supervision import StallWatchdog, cancel_all
from nemo_rl.experience.turns import EnvironmentCall, problem_of_step, role_and_content
from nemo_rl.gateway.sessions import Chain
from nemo_rl.types import AgentResult, Failure, FailureClass, Timings, Trajectory

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray

# The gateway's codes and messages (gateway/completions.py): clients write the one or the other into their errors, and
# of an agent in another process there is nothing but text.
ENGINE_FAILED = ("engine_failed", "the engine failed", "not answered within")
NO_ROOM_LEFT = ("context_length_exceeded", "no room is left for a response")

logger = logging.getLogger(__name__)


async def run_agent_rollouts(jobs: Sequence[RolloutJob], context: RolloutContext) -> tuple[Trajectory, ...]:
    """Each job's agent, at most `max_concurrency` of each at once. Trajectories in the order of `jobs`.

    Waits for agents and the environments that score them; unblocked by either's results. A failure is a trajectory;
    RolloutError is raised on a stall alone.
    """

    async def run(job: RolloutJob, watchdog: StallWatchdog) -> Trajectory:
        return await _AgentRollout(job, context, watchdog).run()

    max_concurrency = {name: runtime.max_concurrency for name, runtime in context.agents.items()}
    return await run_each(jobs, context, run, max_concurrency=max_concurrency)


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is left when an agent has ended and its session is closed."""

    result: AgentResult | Failure
    recording: Recording = field(default_factory=Recording)
    posted: Mapping[str, float] = field(default_factory=dict)


class _AgentRollout:
    """One rollout: the agent, then its score."""

    def __init__(self, job: RolloutJob, context: RolloutContext, watchdog: StallWatchdog) -> None:
        self._job = job
        self._context = context
        self._watchdog = watchdog
        self._runtime: AgentRuntime = context.agents[job.prompt.task_name]

    async def run(self) -> Trajectory:
        clock = time.perf_counter
        started_at = clock()
        ended = await self._in_session()
        agent_s = clock() - started_at
        result = ended.result
        if isinstance(result, AgentResult):
            result = await self._rewarded(result, ended, ended.recording.longest)
        total_s = clock() - started_at
        timings = Timings(agent_s, total_s - agent_s, total_s)
        selection = self._runtime.trajectory_selection
        return recorded_trajectory(self._job, result, ended.recording, timings, selection=selection)

    async def _in_session(self) -> _Ended:
        """The agent's run from the opening of its session to its close; nothing of the agent's is raised."""
        task_name, sessions = self._job.prompt.task_name, self._runtime.sessions
        try:
            async with rollout_session(sessions, self._job, self._context) as handle:
                with self._watchdog.waiting_for(f"agent {task_name}"):
                    outcome = await self._outcome(handle)
                return _ended(outcome, await sessions.finish(handle))
        except Exception as error:  # the gateway: too many sessions, or this one ran into its time to live
            logger.debug("a session of %s failed", task_name, exc_info=error)
            return _Ended(Failure(FailureClass.INFRA, f"gateway: {summarize_error(error)}"))

    async def _outcome(self, handle: "SessionHandle") -> AgentResult | Exception:
        """What the agent returned or raised; a late end, and a cancellation from within, are errors of its own."""
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
            logger.debug("agent %s failed at prompt %s", prompt.task_name, prompt.prompt_id, exc_info=error)
            return error
        finally:
            await cancel_all((task,))

    async def _rewarded(self, result: AgentResult, ended: _Ended, longest: Chain | None) -> AgentResult | Failure:
        """The result with its rewards: its own, else those posted, else those of the environment that scores it."""
        if longest is None:
            return Failure(FailureClass.AGENT, "the agent ended without a model call that succeeded")
        rewards = result.rewards or ended.posted or longest.rewards
        scored_by = self._runtime.scored_by
        if not rewards and scored_by is not None:
            return await self._scored(result.answer, longest, scored_by)
        if not rewards and self._context.scoring.by_task.get(self._job.prompt.task_name):
            return AgentResult({}, result.answer)  # its scorers will say
        if not rewards:
            if ended.recording.is_cut:
                return Failure(FailureClass.AGENT, "the agent ran out of room and gave no reward")
            cause = f"no reward returned or posted, and env.{self._job.prompt.task_name}.scored_by names no environment"
            return Failure(FailureClass.REWARD, cause)
        return rewarded(rewards, result.answer)

    async def _scored(self, answer: str | None, longest: Chain, environment: str) -> AgentResult | Failure:
        conversation = tuple(role_and_content(message.message) for message in longest.message_log)
        state = copy.deepcopy(dict(self._job.prompt.env_state)) | {RESPONSE_TRUNCATED: longest.is_truncated}
        (step,) = await step_environment(
            self._context.environments[environment],
            environment,
            [EnvironmentCall(conversation, state)],
            timeout_s=self._context.environment_timeout_s(environment),
            watchdog=self._watchdog,
        )
        if isinstance(step, Failure):
            return step
        if problem := problem_of_step(step):
            return Failure(FailureClass.ENVIRONMENT, problem)
        return rewarded(step.rewards, step.answer if answer is None else answer)


def _ended(outcome: AgentResult | Exception, finished: "FinishedSession") -> _Ended:
    """An agent that raises because no room was left is cut like any other rollout without room; else it has failed."""
    if not isinstance(outcome, Exception):
        return _Ended(outcome, Recording(finished.chains), finished.rewards)
    text = _texts(outcome)
    if any(sign in text for sign in NO_ROOM_LEFT) and finished.chains:
        return _Ended(AgentResult(), Recording(finished.chains, is_cut=True), finished.rewards)
    is_engines = any(sign in text for sign in ENGINE_FAILED)
    failure = Failure(FailureClass.INFRA if is_engines else FailureClass.AGENT, summarize_error(outcome))
    return _Ended(failure, Recording(finished.chains), finished.rewards)


def _texts(error: BaseException) -> str:
    """The texts of an error and of those that it came from."""
    texts: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        texts.append(str(one))
        one = one.__cause__ or one.__context__
    return "\n".join(texts)
