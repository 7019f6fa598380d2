"""Calls outside of any session, identified by the tokens that a client sends back.

NeMo Gym and others have no sessions: their client keeps `prompt_token_ids` and `generation_token_ids` on the assistant
message and sends them with the next request. They identify the call in this store, which holds its tokens, log-probs
and weight versions.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.chat import flat_token_ids
from nemo_rl.gateway import sessions
from nemo_rl.gateway.codec import Codec
from nemo_rl.types import Completion, Message

MAX_DUPLICATE_CALLS = 1024  # calls with equal prompt and sampled tokens
LOGPROB_TOLERANCE = 1e-6  # absolute; rounding of log-probs by clients


class EchoedCallStore:
    """The last `max_calls` calls without a session, each kept for `ttl_s` seconds after its last use.

    Calls with equal prompt and sampled tokens, as rollouts of one group may have, are kept as duplicates.
    """

    def __init__(self, codec: Codec, *, max_calls: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._codec = codec
        self._max_calls = max_calls
        self._ttl_s = ttl_s
        self._clock = clock
        # Digest of an echo -> (time of last use, its calls); least recently used first.
        self._calls_by_echo: OrderedDict[bytes, tuple[float, list[sessions.Node]]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of stored calls, duplicates counted once."""
        return len(self._calls_by_echo)

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        echo: sessions.Echo | None,
        num_known: int = 0,
    ) -> sessions.PendingCall:
        """Encode a call: the echoed call's tokens, then those of the messages from index `num_known` on.

        The text of earlier messages is not compared with the echo. Without an echo, a new chain begins.
        Raises UnknownEcho, and ConfigError for messages that the chat template refuses.
        """
        request = sessions.history_digests(messages, tools)[-1]
        if echo is None or num_known >= len(messages):
            return sessions.start_chain(self._codec, messages, tools, request)
        node = sessions.find_echoed(self.find(echo), echo, messages[:num_known])
        call = sessions.continue_chain(self._codec, node, messages[num_known:], tools, request)
        return sessions.start_chain(self._codec, messages, tools, request) if call is None else call

    def commit(self, call: sessions.PendingCall, completion: Completion, message: Message) -> None:
        """Store a completed call for requests that continue it."""
        self.expire()
        key = sessions.Echo(call.prompt_token_ids, completion.token_ids).digest()
        _, duplicates = self._calls_by_echo.get(key, (0.0, []))
        duplicates.append(sessions.complete_call(call, completion, message))
        del duplicates[:-MAX_DUPLICATE_CALLS]
        self._calls_by_echo[key] = (self._clock(), duplicates)
        self._calls_by_echo.move_to_end(key)
        if len(self._calls_by_echo) > self._max_calls:
            self._calls_by_echo.popitem(last=False)

    def find(self, echo: sessions.Echo) -> tuple[sessions.Node, ...]:
        """Return the calls with these tokens, in order of commits, and renew their time to live."""
        key = echo.digest()
        if key not in self._calls_by_echo:
            return ()
        _, duplicates = self._calls_by_echo[key]
        self._calls_by_echo[key] = (self._clock(), duplicates)
        self._calls_by_echo.move_to_end(key)
        return tuple(duplicates)

    def forget(self, echo: sessions.Echo, node: sessions.Node) -> None:
        """Drop a claimed call, or one of its duplicates if it is gone: each call stored is claimed at most once."""
        key = echo.digest()
        _, duplicates = self._calls_by_echo.get(key, (0.0, []))
        if duplicates:
            duplicates.remove(node if node in duplicates else duplicates[-1])
            if not duplicates:
                del self._calls_by_echo[key]

    def expire(self) -> None:
        """Drop calls that are past their time to live."""
        while self._calls_by_echo and self._clock() - next(iter(self._calls_by_echo.values()))[0] > self._ttl_s:
            self._calls_by_echo.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Claim:
    """One call as its client reports it."""

    echo: sessions.Echo
    logprobs: tuple[float, ...]  # one per generated token


class LogprobMismatch(Exception):
    """A client reported log-probs that differ from those it was sent."""


def resolve_claims(
    claims: Sequence[Claim], find: Callable[[sessions.Echo], Sequence[sessions.Node]]
) -> tuple[sessions.Node, ...]:
    """Return the recorded call of each claim; `find` returns the calls with an echo's tokens.

    Of several with equal tokens, an earlier claim is the call that a later one continues, so that both are one chain.
    Raises UnknownEcho and LogprobMismatch.
    """
    calls: list[sessions.Node] = []  # last first
    earlier: dict[sessions.Node, None] = {}  # calls that these continue, in order
    for claim in reversed(claims):
        calls.append(_resolve_claim(claim, find(claim.echo), earlier))
        earlier |= dict.fromkeys(calls[-1].path()[:-1])
    return tuple(reversed(calls))


def build_chains(calls: Sequence[sessions.Node]) -> tuple[sessions.Chain, ...]:
    """Return the chains that end at these calls, in order; a call that another one continues adds no chain."""
    continued = {earlier for call in calls for earlier in call.path()[:-1]}
    return tuple(sessions.build_chain(call) for call in dict.fromkeys(calls) if call not in continued)


def _resolve_claim(
    claim: Claim, candidates: Sequence[sessions.Node], earlier: Collection[sessions.Node]
) -> sessions.Node:
    """Return the call with these log-probs; among several, one of `earlier`, one that was continued, or the last."""
    if not candidates:
        raise sessions.UnknownEcho(claim.echo)
    same = [node for node in candidates if _logprobs_match(claim.logprobs, node.sampled.generation_logprobs or ())]
    if continued := next((node for node in earlier if node in same or _is_claimed(node, claim)), None):
        return continued
    if not same:
        raise LogprobMismatch(_describe_mismatch(claim.logprobs, candidates[-1].sampled.generation_logprobs or ()))
    return next((node for node in same if node.is_continued), same[-1])


def _is_claimed(node: sessions.Node, claim: Claim) -> bool:
    """Return whether a call has the tokens and log-probs of a claim."""
    sampled, echo = node.sampled, claim.echo
    if sampled.token_ids != echo.generation_token_ids:
        return False
    if not _logprobs_match(claim.logprobs, sampled.generation_logprobs or ()):
        return False
    return flat_token_ids(node.message_log()[:-1]) == echo.prompt_token_ids


def _logprobs_match(reported: Sequence[float], recorded: Sequence[float]) -> bool:
    if reported == recorded:  # the usual case, without arithmetic
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
