"""How background collection fared between two steps: what the trainer waited for, and how long rollouts ran."""

import contextlib
import time
from collections.abc import Callable, Iterator

from nemo_rl.experience.replay_buffer import Wait


class CollectionMeter:
    """Seconds and counts since the last `take`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_dropped = 0
        self._clock = clock
        self._since = clock()
        self._waited_s = dict.fromkeys(Wait, 0.0)
        self._busy_s = 0.0
        self._busy_since: float | None = None  # None: nothing runs

    @contextlib.contextmanager
    def waiting(self, cause: Wait) -> Iterator[None]:
        """The trainer waits inside."""
        started = self._clock()
        try:
            yield
        finally:
            self._waited_s[cause] += self._clock() - started

    def runs(self, num_tasks: int) -> None:
        """To be told how many tasks run whenever that changes."""
        now = self._clock()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if num_tasks else None

    def take(self) -> dict[str, float]:
        """Metrics by name; what follows is counted afresh."""
        self.runs(self._busy_since is not None)
        now = self._clock()
        metrics = {f"efficiency/exposed_wait_s/{cause}": seconds for cause, seconds in self._waited_s.items()}
        metrics["efficiency/generation_busy_pct"] = 100 * self._busy_s / max(now - self._since, 1e-9)
        metrics["replay_buffer/dropped_groups"] = float(self.num_dropped)
        self._since, self._busy_s, self.num_dropped = now, 0.0, 0
        self._waited_s = dict.fromkeys(Wait, 0.0)
        return metrics
