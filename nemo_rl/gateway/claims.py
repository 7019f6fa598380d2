"""Calls that a client reports when it has ended, checked against what was recorded here.

The client's word is a name alone: tokens, log-probs and weight versions that are trained on are the record's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_rl.gateway.echo import Echo, UnknownEcho
from nemo_rl.gateway.sessions import Chain, Node, build_chain

LOGPROB_TOLERANCE = 1e-6  # of a log-prob: what a client may lose by writing it down


@dataclass(frozen=True, slots=True)
class Claim:
    """One call, as its client reports it."""

    echo: Echo
    logprobs: tuple[float, ...]  # of the generated tokens


class LogprobMismatch(Exception):
    """A client reports other log-probs than it was sent."""


def resolve_claims(claims: Sequence[Claim], find: Callable[[Echo], Sequence[Node]]) -> tuple[Node, ...]:
    """The recorded call of each claim. `find` gives those of an echo, several where the same was sampled twice.

    Raises UnknownEcho, LogprobMismatch.
    """
    return tuple(_resolve_claim(claim, find(claim.echo)) for claim in claims)


def build_chains(calls: Sequence[Node]) -> tuple[Chain, ...]:
    """The histories that calls make, in their order; a call that another one continues is part of that one's."""
    continued = {earlier for call in calls for earlier in call.path()[:-1]}
    return tuple(build_chain(call) for call in dict.fromkeys(calls) if call not in continued)


def _resolve_claim(claim: Claim, candidates: Sequence[Node]) -> Node:
    """Of calls with the same tokens the one of these log-probs; of equal ones one that was continued, else the last."""
    if not candidates:
        raise UnknownEcho(claim.echo)
    same = [node for node in candidates if _logprobs_match(claim.logprobs, node.sampled.generation_logprobs or ())]
    if not same:
        raise LogprobMismatch(_describe_mismatch(claim.logprobs, candidates[-1].sampled.generation_logprobs or ()))
    return next((node for node in same if node.is_continued), same[-1])


def _logprobs_match(reported: Sequence[float], recorded: Sequence[float]) -> bool:
    if reported == recorded:  # tuples of what went out and came back unchanged
        return True
    return len(reported) == len(recorded) and all(
        abs(a - b) <= LOGPROB_TOLERANCE for a, b in zip(reported, recorded, strict=True)
    )


def _describe_mismatch(reported: Sequence[float], recorded: Sequence[float]) -> str:
    if len(reported) != len(recorded):
        return f"{len(reported)} log-probs were reported for {len(recorded)} generated tokens"
    if non_finite := [
        f"log-prob {i} was reported as {each}" for i, each in enumerate(reported) if not math.isfinite(each)
    ]:
        return non_finite[0]
    worst = max(abs(a - b) for a, b in zip(reported, recorded, strict=True))
    return f"the log-probs that were reported differ by {worst:.3g} from those that were sampled"
