"""Registry of live sessions: opened, looked up, closed, expired. No I/O; the clock is passed in."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.schema import RequestError
from nemo_rl.gateway.sessions import PendingCall, Session
from nemo_rl.types import SamplingParams

ID_BYTES = 24  # randomness of a session's id, its only protection
MAX_REMEMBERED_CLOSED = 10_000


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session with its running calls."""

    session_id: str
    session: Session
    seed: int
    last_used_at: float
    sampling: SamplingParams | None = None  # of its calls; None: the run's
    trains: bool = True  # False: validation, evaluation
    is_closed: bool = False
    running: set[asyncio.Task[object]] = field(default_factory=set)  # generations in flight
    _sample_indices: dict[tuple[int, bytes], set[int]] = field(default_factory=dict)
    _in_flight: dict[tuple[int, bytes], set[int]] = field(default_factory=dict)
    _parallel: dict[tuple[int, bytes], set[int]] = field(default_factory=dict)

    def acquire_sample_index(self, call: PendingCall) -> int:
        """Return the call's index among those with the same request and parent, from 0; its seed depends on it."""
        key = id(call.parent), call.request
        taken = self._sample_indices.setdefault(key, set())
        sample_index = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(sample_index)
        in_flight = self._in_flight.setdefault(key, set())
        in_flight.add(sample_index)
        if len(in_flight) > 1:
            self._parallel.setdefault(key, set()).update(in_flight)
        return sample_index

    def end_sample(self, call: PendingCall, sample_index: int) -> bool:
        """End a call that was answered; return whether another with the same request and parent ran beside it."""
        key = id(call.parent), call.request
        self._in_flight[key].discard(sample_index)
        return sample_index in self._parallel.get(key, ())

    def release_sample_index(self, call: PendingCall, sample_index: int) -> None:
        """Free the index of a failed call, so that its retry samples what it would have sampled."""
        key = id(call.parent), call.request
        for indices in (self._sample_indices, self._in_flight, self._parallel):
            indices.get(key, set()).discard(sample_index)


class SessionRegistry:
    """The sessions of one server. An id is answered with 404 if it is unknown or long forgotten, 409 if closed."""

    def __init__(self, codec: Codec, *, max_sessions: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._codec = codec
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._clock = clock
        self._live: OrderedDict[str, LiveSession] = OrderedDict()  # longest unused first
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def open(self, *, seed: int, sampling: SamplingParams | None = None, trains: bool = True) -> LiveSession:
        """Open a session under an id that cannot be guessed; raises RequestError 429 when there are too many."""
        self.expire()
        if len(self._live) >= self._max_sessions:
            raise RequestError(429, f"{self._max_sessions} sessions are open", code="too_many_sessions")
        session_id = secrets.token_urlsafe(ID_BYTES)
        live = LiveSession(session_id, Session(self._codec), seed, self._clock(), sampling, trains)
        self._live[session_id] = live
        return live

    def get(self, session_id: str) -> LiveSession:
        """Return the live session of that id and renew its time to live; raises RequestError 404 or 409."""
        if session_id in self._closed:
            raise RequestError(409, "this session is closed", code="session_closed")
        if session_id not in self._live:
            raise RequestError(404, "no such session", code="session_not_found")
        live = self._live[session_id]
        live.last_used_at = self._clock()
        self._live.move_to_end(session_id)
        return live

    def is_known(self, session_id: str) -> bool:
        """Return whether a session of that id is open, or was closed not long ago."""
        return session_id in self._live or session_id in self._closed

    def close(self, session_id: str) -> Session:
        """Close a session, cancel its running calls and return it. Raises RequestError 404 or 409."""
        live = self.get(session_id)
        del self._live[session_id]
        live.is_closed = True
        for task in live.running:
            task.cancel()
        self._closed[session_id] = None
        if len(self._closed) > MAX_REMEMBERED_CLOSED:
            self._closed.popitem(last=False)
        return live.session

    def expire(self) -> list[str]:
        """Close the sessions that are past their time to live and have no running call; return their ids."""
        cutoff = self._clock() - self._ttl_s
        idle = [live.session_id for live in self._live.values() if live.last_used_at < cutoff and not live.running]
        for session_id in idle:
            self.close(session_id)
        return idle

    def close_all(self) -> None:
        """Close all sessions."""
        for session_id in tuple(self._live):
            self.close(session_id)
