"""Which replica a request goes to: the one that its session is on, else the least busy. Pure; the router uses it."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

MAX_SESSIONS = 100_000  # remembered; the one that was silent for longest is forgotten first


class Seats:
    """Counts each replica's running requests and remembers the replica of each session."""

    def __init__(self, replicas: Iterable[int], *, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._running = dict.fromkeys(replicas, 0)
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._num_sessions: Counter[int] = Counter()

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(self._running)

    def take(self, session_id: str) -> int:
        """The replica for a request of `session_id`, counted as running there until `leave`.

        The least busy has the fewest running requests, among equals the fewest sessions, then the lowest number.
        Raises LookupError when there is no replica.
        """
        if not self._running:
            raise LookupError("no replica is left")
        replica = self._sessions.pop(session_id, None)
        if replica is None:
            replica = min(self._running, key=lambda one: (self._running[one], self._num_sessions[one], one))
            self._num_sessions[replica] += 1
        self._sessions[session_id] = replica
        if len(self._sessions) > self._max_sessions:
            self._num_sessions[self._sessions.popitem(last=False)[1]] -= 1
        self._running[replica] += 1
        return replica

    def leave(self, replica: int) -> None:
        """One request of `replica` has ended; nothing when the replica was removed meanwhile."""
        if replica in self._running:
            self._running[replica] -= 1

    def forget(self, session_id: str) -> None:
        """Let the session's next request go to the least busy replica."""
        if (replica := self._sessions.pop(session_id, None)) is not None:
            self._num_sessions[replica] -= 1

    def add(self, replica: int) -> None:
        self._running[replica] = 0

    def remove(self, replica: int) -> None:
        """Its sessions are placed anew at their next request."""
        self._running.pop(replica, None)
        self._num_sessions.pop(replica, None)
        for session_id in [session for session, seat in self._sessions.items() if seat == replica]:
            del self._sessions[session_id]
