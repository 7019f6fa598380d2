"""Least busy first: which of several equal servers, engines or actors takes the next work. Pure bookkeeping."""

import contextlib
import heapq
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
        self._heap: list[tuple[int, int, int, MemberT]] = []  # busyness of members, the present one and former ones
        self._sort()

    @property
    def members(self) -> tuple[MemberT, ...]:
        """Return the members that take work."""
        return tuple(self._load)

    @property
    def has_members(self) -> bool:
        return bool(self._load)

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
            member = self._least_busy(avoid)
            self._num_sessions[member] += session_id is not None
        if session_id is not None:
            self._sessions[session_id] = member
            if len(self._sessions) > self._max_sessions:
                self._end_session(self._sessions.popitem(last=False)[1])
        self._load[member] += work
        self._file(member)
        return member

    def release(self, member: MemberT, *, work: int = 1) -> None:
        """Take finished work off `member`, even if it was removed meanwhile."""
        loads = self._load if member in self._load else self._left
        if member in loads:
            loads[member] -= work
            self._file(member)

    def work_of(self, member: MemberT) -> int:
        """Return the work that `member` has in hand, even if it was removed."""
        return self._load.get(member, self._left.get(member, 0))

    @contextlib.contextmanager
    def lease(self, *, work: int = 1, avoid: Collection[MemberT] = ()) -> Iterator[MemberT]:
        member = self.acquire(work=work, avoid=avoid)
        try:
            yield member
        finally:
            self.release(member, work=work)

    def forget(self, session_id: str) -> None:
        """Let the session's next work go to the least busy member."""
        member = self._sessions.pop(session_id, None)
        if member is not None:
            self._end_session(member)

    def add(self, member: MemberT) -> None:
        """Give work to `member` from here on; one that was removed gets its old position, and the work that it still
        has in hand counts."""
        self._load[member] = self._left.pop(member, 0)
        self._order.setdefault(member, len(self._order))
        self._file(member)

    def remove(self, member: MemberT) -> None:
        """Give `member` no more work; its sessions move with their next work."""
        self._left[member] = self._load.pop(member, self._left.get(member, 0))
        self._num_sessions.pop(member, None)
        for session_id in [session for session, holder in self._sessions.items() if holder == member]:
            del self._sessions[session_id]

    def _end_session(self, member: MemberT) -> None:
        self._num_sessions[member] -= 1
        self._file(member)

    def _least_busy(self, avoid: Collection[MemberT]) -> MemberT:
        """Return the least busy member outside of `avoid`, else the least busy one."""
        avoided: list[tuple[int, int, int, MemberT]] = []
        found: MemberT | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            member = entry[-1]
            if member not in self._load or entry[:-1] != self._busyness(member):
                continue  # it was as busy once
            if member in avoid:
                avoided.append(entry)
            else:
                found = member
        for entry in avoided:
            heapq.heappush(self._heap, entry)
        return avoided[0][-1] if found is None else found

    def _file(self, member: MemberT) -> None:
        """Put the member's present busyness into the heap, beside its former ones."""
        if member not in self._load:
            return
        heapq.heappush(self._heap, (*self._busyness(member), member))
        if len(self._heap) > 4 * len(self._load) + 64:
            self._sort()

    def _sort(self) -> None:
        self._heap = [(*self._busyness(member), member) for member in self._load]
        heapq.heapify(self._heap)

    def _busyness(self, member: MemberT) -> tuple[int, int, int]:
        return self._load[member], self._num_sessions[member], self._order[member]
