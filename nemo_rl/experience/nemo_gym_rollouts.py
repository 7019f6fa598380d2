"""Rollouts by NeMo Gym: a session, the row sent to its agent, the calls that the reply names as a trajectory.

Loop, tools and reward are Gym's; tokens, log-probs and weight versions are the gateway's record. What goes wrong is a
`Failure` of its own rollout. No session outlives its rollout.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.environments.nemo_gym.protocols import RolloutIdentity
from nemo_rl.environments.nemo_gym.reply import (
    GymCall,
    GymError,
    GymInvalidReply,
    GymReply,
    GymStackEnded,
    find_answer,
    parse_captured_calls,
)
from nemo_rl.errors import RolloutError
from nemo_rl.experience.gym_runtime import GymRuntime
from nemo_rl.experience.recorded_rollouts import (
    Recording,
    build_recorded_trajectory,
    open_rollout_session,
    run_recorded_rollouts,
    validate_rewards,
)
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.gateway.echoes import Claim, LogprobMismatch
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.sessions import CallFailureKind, Echo, UnknownEcho
from nemo_rl.types import AgentResult, Failure, FailureClass, Timings, Trajectory

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray

GYM_SERVER_INDEX = 0  # the gateway server that all of Gym calls: `GatewayManager.default_base_url`
GYM_ROW_KEY = "row"  # key in a prompt's env_state: the data row in Gym's format


async def run_nemo_gym_rollouts(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Run each job's row, at most `max_concurrency` of a stack at once. Return trajectories in the order of `jobs`.

    Waits for Gym's agents; unblocked by their replies. A failure is a trajectory; RolloutError is raised on a stall,
    and if a stack that the run started is over.
    """

    async def run(job: RolloutJob, watchdog: StallWatchdog) -> Trajectory:
        return await _GymRollout(job, dependencies.gyms[job.prompt.task_name], options, watchdog).run()

    max_concurrency = {name: runtime.max_concurrency for name, runtime in dependencies.gyms.items()}
    return await run_recorded_rollouts(jobs, dependencies, options, run, max_concurrency=max_concurrency)


class _GymRollout:
    def __init__(self, job: RolloutJob, runtime: GymRuntime, options: RolloutOptions, watchdog: StallWatchdog) -> None:
        self._job = job
        self._runtime = runtime
        self._options = options
        self._watchdog = watchdog
        self._identity = RolloutIdentity(task_id=job.prompt.prompt_id)

    async def run(self) -> Trajectory:
        started_at = time.perf_counter()
        try:
            sessions = self._runtime.sessions
            async with open_rollout_session(sessions, self._job, self._options, server=GYM_SERVER_INDEX) as handle:
                result, recording = await self._run_in_session(handle)
        except RequestError as error:  # the gateway: too many sessions, or this one ran into its time to live
            result, recording = (
                error_to_failure(error, FailureClass.INFRA, prefix="gateway"),
                Recording(),
            )
        finally:  # whether it failed, or was cancelled
            self._runtime.sessions.end_capture(self._identity.rollout_id)
        total_s = time.perf_counter() - started_at
        timings = Timings(generation_s=total_s, total_s=total_s)  # how it is shared out is known to Gym alone
        selection = self._runtime.trajectory_selection
        return build_recorded_trajectory(self._job, result, recording, timings, selection=selection)

    async def _run_in_session(self, handle: "SessionHandle") -> tuple[AgentResult | Failure, Recording]:
        reply = await self._run_row(handle)
        sessions = self._runtime.sessions
        if isinstance(reply, Failure):
            finished = await sessions.finish(handle)
            return _attribute_to_engine(reply, finished), Recording(finished.chains)
        try:
            calls = self._take_calls(reply)
            if not calls:
                await sessions.finish(handle)
                return _missing_calls_failure(reply), Recording()
            finished = await sessions.finish_with_claims(handle, [_make_claim(call) for call in calls])
        except (UnknownEcho, LogprobMismatch, GymInvalidReply) as error:
            return error_to_failure(error, FailureClass.AGENT, prefix=self._job.prompt.agent_name), Recording()
        recording = Recording(
            finished.chains, is_incomplete=reply.is_incomplete, loss_weight=0.0 if reply.mask_sample else 1.0
        ).without_rewards()  # only the reply rewards
        rewards = reply.reward_components or {self._job.prompt.task_name: reply.reward}
        result = AgentResult(rewards, find_answer(reply.extras))
        return validate_rewards(result, self._runtime.reward_range), recording

    def _take_calls(self, reply: GymReply) -> tuple[GymCall, ...]:
        """Return the calls in the reply, else those that Gym captured; raises GymInvalidReply if one was lost."""
        captured = self._runtime.sessions.take_capture(reply.capture_key)
        if reply.calls or captured is None:
            return reply.calls
        if captured.is_incomplete:
            cause = f" ({captured.problem})" if captured.problem else ""
            raise GymInvalidReply(f"NeMo Gym failed to capture a call of the model{cause}")
        return parse_captured_calls(captured.records)

    async def _run_row(self, handle: "SessionHandle") -> GymReply | Failure:
        prompt = self._job.prompt
        try:
            row = self._runtime.rows.prepare(prompt.env_state[GYM_ROW_KEY], handle.id)
            with self._watchdog.waiting_for(f"NeMo Gym's {prompt.agent_name}"):
                return await self._runtime.client.run(prompt.agent_name, row, self._identity)
        except GymStackEnded as error:
            raise RolloutError(f"NeMo Gym's stack is over: {error}") from error
        except GymError as error:
            return error_to_failure(error, error.failure_class)
        except Exception as error:  # a row that is not JSON-serializable, for example  # noqa: BLE001
            return error_to_failure(error, prefix=prompt.agent_name)


def _make_claim(call: GymCall) -> Claim:
    return Claim(Echo(call.prompt_token_ids, call.generation_token_ids), call.generation_log_probs)


def _attribute_to_engine(failure: Failure, finished: "FinishedSession") -> Failure:
    """Attribute Gym's failure of a rollout to the engine if the engine failed its last call."""
    last = finished.last_failure
    if last is None or last.kind is not CallFailureKind.ENGINE or failure.failure_class is FailureClass.INFRA:
        return failure
    return replace(failure, failure_class=FailureClass.INFRA, cause=f"{last.cause} ({failure.cause})")


def _missing_calls_failure(reply: GymReply) -> Failure:
    if reply.is_incomplete:
        return Failure(FailureClass.ENVIRONMENT, "the row's prompt leaves no room for a response")
    return Failure(FailureClass.AGENT, "the reply names no call of the model by its tokens")
