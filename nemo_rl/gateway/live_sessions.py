"""Live sessions of a server: opened, looked up, closed, expired. No I/O; the clock is passed in."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.sessions import PendingCall, Session
from nemo_rl.gateway.side_calls import SideCallTest
from nemo_rl.tracing import SpanContext, current_context
from nemo_rl.types import SamplingParams

ID_BYTES = 24  # random bytes of a session's id, its only protection
MAX_REMEMBERED_CLOSED = 10_000


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session with its running calls."""

    session_id: str
    session: Session
    seed: int
    last_used_at: float
    sampling: SamplingParams | None = None  # None: the run's
    trains: bool = True  # False for validation and evaluation
    by_client: bool = False  # opened over HTTP; counts towards a limit of its own
    is_side_call: SideCallTest | None = None  # tells calls that are not trained on
    span: SpanContext | None = field(default_factory=current_context)  # the rollout's, to which its calls belong
    is_closed: bool = False
    running: set[asyncio.Task[object]] = field(default_factory=set)  # generations in flight
    _sample_indices: dict[tuple[int, bytes], set[int]] = field(default_factory=dict)

    def acquire_sample_index(self, call: PendingCall) -> int:
        """Return the call's index, from 0, among calls with the same request and parent; its seed depends on it."""
        key = id(call.parent), call.request
        taken = self._sample_indices.setdefault(key, set())
        sample_index = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(sample_index)
        return sample_index

    def release_sample_index(self, call: PendingCall, sample_index: int) -> None:
        """Free the index of a failed call, so that its retry samples the same tokens."""
        self._sample_indices.get((id(call.parent), call.request), set()).discard(sample_index)


class SessionRegistry:
    """The sessions of one server; an unknown or long forgotten id is 404, a closed one 409."""

    def __init__(
        self, codec: Codec, *, max_sessions: int, max_client_sessions: int = 0, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._codec = codec
        self._max_sessions = max_sessions
        self._max_client_sessions = max_client_sessions
        self._ttl_s = ttl_s
        self._clock = clock
        self._live: OrderedDict[str, LiveSession] = OrderedDict()  # longest unused first
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._num_by_client = 0

    def __len__(self) -> int:
        return len(self._live)

    def open(
        self,
        *,
        seed: int,
        sampling: SamplingParams | None = None,
        trains: bool = True,
        by_client: bool = False,
        is_side_call: SideCallTest | None = None,
    ) -> LiveSession:
        """Open a session under a random id; raises RequestError 429 if too many of its kind are open.

        Sessions of clients and of this program are limited apart, so that neither can use up the other's.
        """
        self.expire()
        num_open = self._num_by_client if by_client else len(self._live) - self._num_by_client
        limit = self._max_client_sessions if by_client else self._max_sessions
        if num_open >= limit:
            kind = "sessions of clients" if by_client else "sessions"
            raise RequestError(429, f"{num_open} {kind} are open, the most allowed", code="too_many_sessions")
        session_id = secrets.token_urlsafe(ID_BYTES)
        session = Session(self._codec)
        live = LiveSession(session_id, session, seed, self._clock(), sampling, trains, by_client, is_side_call)
        self._live[session_id] = live
        self._num_by_client += by_client
        return live

    def get(self, session_id: str) -> LiveSession:
        """Return the live session with that id and renew its time to live; raises RequestError 404 or 409."""
        if session_id in self._closed:
            raise RequestError(409, "this session is closed", code="session_closed")
        if session_id not in self._live:
            raise RequestError(404, "no such session", code="session_not_found")
        live = self._live[session_id]
        self._touch(live)
        return live

    def is_known(self, session_id: str) -> bool:
        """Return whether a session with that id is open or was closed recently."""
        return session_id in self._live or session_id in self._closed

    def close(self, session_id: str) -> Session:
        """Close a session, cancel its running calls and return it. Raises RequestError 404 or 409."""
        live = self.get(session_id)
        del self._live[session_id]
        self._num_by_client -= live.by_client
        live.is_closed = True
        for task in live.running:
            task.cancel()
        self._closed[session_id] = None
        if len(self._closed) > MAX_REMEMBERED_CLOSED:
            self._closed.popitem(last=False)
        return live.session

    def expire(self) -> list[str]:
        """Close sessions that are past their time to live; return their ids. A running call counts as use."""
        cutoff = self._clock() - self._ttl_s
        expired = []
        while self._live and (oldest := next(iter(self._live.values()))).last_used_at < cutoff:
            if oldest.running:
                self._touch(oldest)
            else:
                self.close(oldest.session_id)
                expired.append(oldest.session_id)
        return expired

    def close_all(self) -> None:
        for session_id in tuple(self._live):
            self.close(session_id)

    def _touch(self, live: LiveSession) -> None:
        live.last_used_at = self._clock()
        self._live.move_to_end(live.session_id)
