"""A NeMo Gym stack and the requirements of its rollouts: a client, gateway sessions, prepared rows."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl.environments.nemo_gym.protocols import RolloutIdentity
from nemo_rl.environments.nemo_gym.reply import GymReply
from nemo_rl.experience.agent_runtime import RewardRange, SessionProvider, TrajectorySelection
from nemo_rl.gateway.captures import CaptureSnapshot
from nemo_rl.gateway.dialects.chat_completions import SESSION_FIELD
from nemo_rl.gateway.echoes import Claim

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray

logger = logging.getLogger(__name__)

PARAMETERS = "responses_create_params"
OVERRIDDEN_PARAMETERS = frozenset({"model", "seed", "temperature", "top_p"})
OVERRIDDEN_METADATA = frozenset({"chat_template_kwargs", "extra_body"})  # Gym unfolds them into the call of the model


class RowPreparer:
    """Prepares rows; logs each dropped name once."""

    def __init__(self) -> None:
        self._logged_names: set[str] = set()

    def prepare(self, row: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Return a copy of the row with the session's id in the metadata of its parameters.

        Gym passes a row's metadata on with each call of the model. If an agent does not, its calls have no session:
        they are sampled as the run is, and found by their tokens.
        """
        requested = row.get(PARAMETERS)
        if not isinstance(requested, Mapping):
            return dict(row)  # Gym reports the error
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


class GymAgentRunner(Protocol):
    """A client that runs rows, within its own deadline: `environments.nemo_gym.client.GymClient`."""

    async def run(self, agent: str, row: Mapping[str, Any], identity: RolloutIdentity | None = None) -> GymReply:
        """Run a row by its agent, under a new identity if none is given; raise GymError."""
        ...


class ClaimingSessionProvider(SessionProvider, Protocol):
    """Sessions whose calls a client reports; `gateway.manager.GatewayManager` has them."""

    async def finish_with_claims(self, handle: "SessionHandle", claims: Sequence[Claim]) -> "FinishedSession":
        """Close the session and hand out the chains of these calls. Raises UnknownEcho, LogprobMismatch."""
        ...

    def take_capture(self, rollout_id: str) -> CaptureSnapshot | None:
        """Return and forget the calls that Gym captured of a rollout; None if it captured none."""
        ...

    def end_capture(self, rollout_id: str) -> None:
        """Forget the calls that Gym captured in any attempt of a rollout that is over."""
        ...


@dataclass(frozen=True, slots=True)
class GymRuntime:
    """A NeMo Gym stack, its gateway sessions and its limits."""

    client: GymAgentRunner
    sessions: ClaimingSessionProvider  # sessions of the server that Gym's model server calls
    max_concurrency: int  # rollouts at once
    trajectory_selection: TrajectorySelection = "all"  # which histories are trained on
    reward_range: RewardRange = field(default_factory=RewardRange)
    rows: RowPreparer = field(default_factory=RowPreparer)
