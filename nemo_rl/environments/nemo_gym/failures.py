"""Failures that NeMo Gym reports: its vocabulary of kinds and stages, and the failure class of each.

Source: nemo_gym/failure_kinds.py, episode_types.py and rollout_collection.py of nemo-gym 0.7. A kind names what went
wrong, a stage where an episode stood. Neither is a verdict on the response, so that no reward is taken from a failure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from nemo_rl.errors import escape
from nemo_rl.types import FailureClass

Delivery: TypeAlias = Literal["not_sent", "possibly_delivered", "delivered"]  # a row's, to the server that runs it

CLASS_OF_KIND: Mapping[str, FailureClass] = {
    "transport_unreachable": FailureClass.INFRA,
    "transport_peer_drop": FailureClass.INFRA,
    "transport_timeout": FailureClass.INFRA,
    "transport_local_resource": FailureClass.INFRA,
    "agent_run_error": FailureClass.AGENT,
    "agent_request_failed": FailureClass.INFRA,  # a proxy answered instead of the agent
    "agent_timeout": FailureClass.AGENT,
    "agent_command_not_allowed": FailureClass.AGENT,
    "judge_failed": FailureClass.REWARD,
    "judge_unparseable": FailureClass.REWARD,
    "verifier_error": FailureClass.REWARD,
    "provider_unavailable": FailureClass.INFRA,
    "provider_quota_exhausted": FailureClass.INFRA,
    "provider_oom_killed": FailureClass.ENVIRONMENT,
    "session_lost": FailureClass.ENVIRONMENT,
    "session_expired": FailureClass.ENVIRONMENT,
    "session_release_failed": FailureClass.ENVIRONMENT,
    "cancelled": FailureClass.INFRA,  # by Gym: FailureClass.CANCELLED stands for rollouts that this run gives up
    "kill_shaped": FailureClass.INFRA,
    "shutdown": FailureClass.INFRA,
    "persistence_failed": FailureClass.INFRA,
    "cohort_incomplete": FailureClass.REWARD,
}
CLASS_OF_STAGE: Mapping[str, FailureClass] = {
    "admission": FailureClass.INFRA,
    "seed": FailureClass.ENVIRONMENT,
    "agent": FailureClass.AGENT,
    "verification": FailureClass.REWARD,
    "cleanup": FailureClass.ENVIRONMENT,
}
ADMISSION = "admission"
MAX_REASON_CHARACTERS = 500
MAX_NAME_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """A failure as a server reports it."""

    reason: str
    kind: str | None = None  # None: unclassified; may be outside of the vocabulary, e.g. "server:kind"
    stage: str | None = None  # None: unknown
    is_terminal: bool = True  # the same episode must not be attempted again

    @property
    def failure_class(self) -> FailureClass:
        """Return the class of the kind, else that of the stage."""
        by_stage = CLASS_OF_STAGE.get(self.stage or "", FailureClass.ENVIRONMENT)
        return CLASS_OF_KIND.get(self.kind or "", by_stage)

    @property
    def may_be_sent_again(self) -> bool:
        """Return whether the episode was turned away before it began."""
        return self.stage == ADMISSION and not self.is_terminal

    def __str__(self) -> str:
        kind = escape(self.kind or "failed", MAX_NAME_CHARACTERS)
        stage = f" at stage {escape(self.stage, MAX_NAME_CHARACTERS)}" if self.stage else ""
        return f"{kind}{stage}: {escape(' '.join(self.reason.split()), MAX_REASON_CHARACTERS) or 'no reason given'}"


def parse_episode_failure(value: Mapping[str, Any]) -> EpisodeFailure:
    """Return the `failure` of an episode's response. Fields of a wrong type count as absent."""
    return EpisodeFailure(
        reason=_text(value.get("failure_reason")) or "",
        kind=_text(value.get("failure_kind")),
        stage=_text(value.get("stage")),
        is_terminal=value.get("terminal") is not False,
    )


def find_row_failure(body: Mapping[str, Any], *, mask_is_failure: bool) -> EpisodeFailure | None:
    """Return the failure that a flat reply reports beside or instead of a reward; None if its reward stands.

    A reply is a failure if it carries Gym's routing marks (`_ng_failure_class`, `_ng_no_persist`), or if it is masked
    and names a kind. `mask_is_failure`: any masked reply is one, as nemo-gym 0.7 defines it. A kind without a mask is a
    diagnosis of a valid reward.
    """
    routed, kind = _text(body.get("_ng_failure_class")), _text(body.get("failure_kind"))
    if routed is None and body.get("_ng_no_persist") is True:
        routed = "kill_shaped"
    if routed is None and not (is_masked(body) and (mask_is_failure or kind is not None)):
        return None
    reasons = ("_ng_failure_message", "failure_reason", "error", "error_message", "_ng_failure_judge_error")
    return EpisodeFailure(
        reason=next((text for name in reasons if (text := _text(body.get(name)))), ""),
        kind=kind or routed or "masked",
        stage=_text(body.get("_ng_failure_stage")),
        is_terminal=body.get("_ng_failure_terminal") is not False,
    )


def is_masked(body: Mapping[str, Any]) -> bool:
    """Return whether a reply is masked, by its own field or as servers of earlier releases wrote it."""
    settings = body.get("instance_config")
    earlier = settings.get("mask_sample") if isinstance(settings, Mapping) else None
    return body.get("mask_sample") is True or earlier is True


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
