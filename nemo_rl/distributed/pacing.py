"""How fast servers are asked: so many requests and tokens a minute, so many at once, the least busy replica first."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field


class PerMinute:
    """Lets units through at an even pace: the generic cell rate algorithm (ITU-T I.371) without bursts.

    Example: at 60 a minute the third of three callers at once waits 2 s; one that takes 5 units keeps the next for 5 s.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`rate` units a minute; None: no limit."""
        self._seconds_a_unit = 60.0 / rate if rate else 0.0
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._sleep = sleep
        self._free_at = 0.0

    async def take(self, units: float = 1.0) -> None:
        """Return when `units` more are allowed; callers are served in their order."""
        if not self._seconds_a_unit:
            return
        now = self._clock()
        begins_at = max(now, self._free_at)
        self._free_at = begins_at + units * self._seconds_a_unit
        if begins_at > now:
            await self._sleep(begins_at - now)

    def correct(self, units: float) -> None:
        """Count what a request took beyond its estimate; less than it, where negative."""
        self._free_at += units * self._seconds_a_unit


@dataclass(slots=True)
class Replica:
    """One server of several that answer the same."""

    url: str
    num_running: int = 0


@dataclass(slots=True)
class Replicas:
    """Gives each request to the replica with the fewest running, the first of them; one that failed it comes last."""

    replicas: list[Replica] = field(default_factory=list)

    @classmethod
    def of(cls, urls: Sequence[str]) -> "Replicas":
        return cls([Replica(url) for url in urls])

    @contextlib.asynccontextmanager
    async def least_busy(self, avoid: Sequence[str] = ()) -> AsyncIterator[str]:
        """The URL of a replica that is kept busy inside the block; one of `avoid` only where there is no other."""
        replica = min(self.replicas, key=lambda one: (one.url in avoid, one.num_running))
        replica.num_running += 1
        try:
            yield replica.url
        finally:
            replica.num_running -= 1
