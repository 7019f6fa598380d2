"""Least busy first: which of several equal servers, engines or actors takes the next work. Pure bookkeeping."""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

MAX_SESSIONS = 100_000  # remembered; the one that was silent for longest is forgotten first

MemberT = TypeVar("MemberT", bound=Hashable)


class LoadBalancer(Generic[MemberT]):
    """Counts the work that each member has in hand and picks the least busy member for more.

    The least busy member has the least work, among equals the fewest sessions, among those the first place in
    `members`. Work of a session, if it names one, stays on the member that its first piece went to.
    """

    def __init__(self, members: Iterable[MemberT], *, max_sessions: int = MAX_SESSIONS) -> None:
        self._load = dict.fromkeys(members, 0)
        self._left: dict[MemberT, int] = {}  # work of members that were removed
        self._order = {member: position for position, member in enumerate(self._load)}
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, MemberT] = OrderedDict()
        self._num_sessions: Counter[MemberT] = Counter()

    @property
    def members(self) -> tuple[MemberT, ...]:
        """Return the members that take work."""
        return tuple(self._load)

    @property
    def load(self) -> dict[MemberT, int]:
        """Return the work that each member has in hand."""
        return dict(self._load)

    def acquire(self, session_id: str | None = None, *, work: int = 1, avoid: Collection[MemberT] = ()) -> MemberT:
        """Return the member for `work` more, counted until `release`; one of `avoid` only if there is no other.

        Raises LookupError when there is no member.
        """
        if not self._load:
            raise LookupError("no member is left")
        member = None if session_id is None else self._sessions.pop(session_id, None)
        if member is None:
            member = min(self._load, key=lambda one: (one in avoid, *self._busyness(one)))
            self._num_sessions[member] += session_id is not None
        if session_id is not None:
            self._sessions[session_id] = member
            if len(self._sessions) > self._max_sessions:
                self._num_sessions[self._sessions.popitem(last=False)[1]] -= 1
        self._load[member] += work
        return member

    def release(self, member: MemberT, *, work: int = 1) -> None:
        """Take finished work off `member`, even if it was removed meanwhile."""
        loads = self._load if member in self._load else self._left
        if member in loads:
            loads[member] -= work

    def work_of(self, member: MemberT) -> int:
        """Return the work that `member` has in hand, even if it was removed."""
        return self._load.get(member, self._left.get(member, 0))

    @contextlib.contextmanager
    def lease(self, *, work: int = 1, avoid: Collection[MemberT] = ()) -> Iterator[MemberT]:
        """Acquire a member for the block."""
        member = self.acquire(work=work, avoid=avoid)
        try:
            yield member
        finally:
            self.release(member, work=work)

    def forget(self, session_id: str) -> None:
        """Let the session's next work go to the least busy member."""
        member = self._sessions.pop(session_id, None)
        if member is not None:
            self._num_sessions[member] -= 1

    def add(self, member: MemberT) -> None:
        """Give work to `member` from here on; one that was removed gets its old position, and the work that it still
        has in hand counts."""
        self._load[member] = self._left.pop(member, 0)
        self._order.setdefault(member, len(self._order))

    def remove(self, member: MemberT) -> None:
        """Give `member` no more work; its sessions move with their next work."""
        self._left[member] = self._load.pop(member, self._left.get(member, 0))
        self._num_sessions.pop(member, None)
        for session_id in [session for session, holder in self._sessions.items() if holder == member]:
            del self._sessions[session_id]

    def _busyness(self, member: MemberT) -> tuple[int, int, int]:
        return self._load[member], self._num_sessions[member], self._order[member]
