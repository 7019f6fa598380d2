"""Rollouts by NeMo Gym: a session, the row sent to its agent, the calls that the reply names as a trajectory.

Loop, tools and reward are Gym's; tokens, log-probs and weight versions are the gateway's record. What goes wrong is a
`Failure` of its own rollout. No session outlives its rollout.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.environments.nemo_gym.reply import GymCall, GymError, GymReply, GymStackEnded, GymUnavailable
from nemo_rl.errors import RolloutError
from nemo_rl.experience import agent_rollouts
from nemo_rl.experience.agents import SessionProvider
from nemo_rl.experience.rollouts import RolloutDependencies, RolloutJob, RolloutOptions
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.gateway.echoes import Claim, LogprobMismatch
from nemo_rl.gateway.schema import SESSION_FIELD, RequestError
from nemo_rl.gateway.sessions import CallFailureKind, Echo, UnknownEcho
from nemo_rl.types import AgentResult, Failure, FailureClass, Timings, Trajectory

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray

logger = logging.getLogger(__name__)

PARAMETERS = "responses_create_params"
OVERRIDDEN_PARAMETERS = frozenset({"model", "seed", "temperature", "top_p"})
OVERRIDDEN_METADATA = frozenset({"chat_template_kwargs", "extra_body"})  # Gym unfolds them into the call of the model


class RowPreparer:
    """Prepares rows; notes once what it leaves out of them."""

    def __init__(self) -> None:
        self._logged_names: set[str] = set()

    def prepare(self, row: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Return a copy of the row with the session's id in the metadata of its parameters.

        Gym passes a row's metadata on with each call of the model. Where an agent does not, its calls have no session:
        they are sampled as the run is, and found by their tokens.
        """
        requested = row.get(PARAMETERS)
        if not isinstance(requested, Mapping):
            return dict(row)  # Gym says what is wrong with it
        parameters = {name: value for name, value in requested.items() if name not in OVERRIDDEN_PARAMETERS}
        metadata = requested.get("metadata") or {}
        own = {name: value for name, value in metadata.items() if name not in OVERRIDDEN_METADATA}
        dropped = {name for name in requested.keys() - parameters.keys() if requested[name] is not None}
        self._log_dropped_names(dropped | {f"metadata.{name}" for name in metadata.keys() - own.keys()})
        return {**row, PARAMETERS: {**parameters, "metadata": {**own, SESSION_FIELD: session_id}}}

    def _log_dropped_names(self, names: set[str]) -> None:
        if unlogged := sorted(names - self._logged_names):
            self._logged_names.update(unlogged)
            logger.info(
                "%s of NeMo Gym's rows are ignored: the run decides how tokens are sampled", ", ".join(unlogged)
            )


GYM_SERVER_INDEX = 0  # of the gateway: `GatewayManager.default_base_url`, which all of Gym calls
GYM_ROW_KEY = "row"  # in a prompt's env_state: the data row as Gym wants it
EXTRACTED_ANSWER_KEY = "extracted_answer"  # in a reply: what many of Gym's environments understood as the answer


class GymAgentRunner(Protocol):
    """A client that runs rows, within its own deadline: `environments.nemo_gym.client.GymClient`."""

    async def run(self, agent: str, row: Mapping[str, Any]) -> GymReply:
        """Run a row by its agent; raise GymError."""
        ...


class ClaimingSessionProvider(SessionProvider, Protocol):
    """Sessions whose calls a client reports; `gateway.manager.GatewayManager` has them."""

    async def finish_with_claims(self, handle: "SessionHandle", claims: Sequence[Claim]) -> "FinishedSession":
        """Close the session and hand out the chains of these calls. Raises UnknownEcho, LogprobMismatch."""
        ...


@dataclass(frozen=True, slots=True)
class GymRuntime:
    """A stack of NeMo Gym with what its rollouts need."""

    client: GymAgentRunner
    sessions: ClaimingSessionProvider  # of the server that Gym's model server calls
    max_concurrency: int  # rollouts at once
    trajectory_selection: agent_rollouts.TrajectorySelection = "all"  # which histories are trained on
    rows: RowPreparer = field(default_factory=RowPreparer)


async def run_nemo_gym_rollouts(
    jobs: Sequence[RolloutJob], dependencies: RolloutDependencies, options: RolloutOptions
) -> tuple[Trajectory, ...]:
    """Run each job's row, at most `max_concurrency` of a stack at once. Return trajectories in the order of `jobs`.

    Waits for Gym's agents; unblocked by their replies. A failure is a trajectory; RolloutError is raised on a stall,
    and where a stack that the run started is over.
    """

    async def run(job: RolloutJob, watchdog: StallWatchdog) -> Trajectory:
        return await _GymRollout(job, dependencies.gyms[job.prompt.task_name], options, watchdog).run()

    max_concurrency = {name: runtime.max_concurrency for name, runtime in dependencies.gyms.items()}
    return await agent_rollouts.run_recorded_rollouts(jobs, dependencies, options, run, max_concurrency=max_concurrency)


class _GymRollout:
    """One rollout."""

    def __init__(self, job: RolloutJob, runtime: GymRuntime, options: RolloutOptions, watchdog: StallWatchdog) -> None:
        self._job = job
        self._runtime = runtime
        self._options = options
        self._watchdog = watchdog

    async def run(self) -> Trajectory:
        started_at = time.perf_counter()
        try:
            sessions = self._runtime.sessions
            async with agent_rollouts.open_rollout_session(
                sessions, self._job, self._options, server=GYM_SERVER_INDEX
            ) as handle:
                result, recording = await self._run_in_session(handle)
        except RequestError as error:  # the gateway: too many sessions, or this one ran into its time to live
            result, recording = (
                error_to_failure(error, FailureClass.INFRA, prefix="gateway"),
                agent_rollouts.Recording(),
            )
        total_s = time.perf_counter() - started_at
        timings = Timings(generation_s=total_s, total_s=total_s)  # how it is shared out is known to Gym alone
        selection = self._runtime.trajectory_selection
        return agent_rollouts.build_recorded_trajectory(self._job, result, recording, timings, selection=selection)

    async def _run_in_session(self, handle: "SessionHandle") -> tuple[AgentResult | Failure, agent_rollouts.Recording]:
        reply = await self._run_row(handle)
        sessions = self._runtime.sessions
        if isinstance(reply, Failure):
            finished = await sessions.finish(handle)
            return _attribute_to_engine(reply, finished), agent_rollouts.Recording(finished.chains)
        if not reply.calls:
            await sessions.finish(handle)
            return _missing_calls_failure(reply), agent_rollouts.Recording()
        try:
            finished = await sessions.finish_with_claims(handle, [_make_claim(call) for call in reply.calls])
        except (UnknownEcho, LogprobMismatch) as error:
            return error_to_failure(
                error, FailureClass.AGENT, prefix=self._job.prompt.agent_name
            ), agent_rollouts.Recording()
        recording = agent_rollouts.Recording(
            finished.chains, is_incomplete=reply.is_incomplete, loss_weight=0.0 if reply.mask_sample else 1.0
        )
        answer = reply.extras.get(EXTRACTED_ANSWER_KEY)
        reward = reply.reward_components or {self._job.prompt.task_name: reply.reward}
        return agent_rollouts.validate_rewards(reward, None if answer is None else str(answer)), recording

    async def _run_row(self, handle: "SessionHandle") -> GymReply | Failure:
        prompt = self._job.prompt
        try:
            row = self._runtime.rows.prepare(prompt.env_state[GYM_ROW_KEY], handle.id)
            with self._watchdog.waiting_for(f"NeMo Gym's {prompt.agent_name}"):
                return await self._runtime.client.run(prompt.agent_name, row)
        except GymStackEnded as error:
            raise RolloutError(f"NeMo Gym's stack is over: {error}") from error
        except GymUnavailable as error:
            return error_to_failure(error, FailureClass.INFRA)
        except GymError as error:
            return error_to_failure(error)
        except Exception as error:  # a row that no JSON can be made of, and what else may be wrong with it
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
