"""Timer: the seconds that each phase of a step took."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Phase:
    closed_s: float = 0.0  # of the blocks that have ended
    open_blocks: int = 0
    opened_at: float = 0.0


class StepTimer:
    """Timer of named blocks; for one event loop.

    A name's time is that during which at least one block of the name was open: consecutive blocks add up, and
    overlapping ones (in tasks, or nested) count once.

    Example: `with timer("policy_training"): ...`, then `timer.seconds()` is `{"policy_training": 0.42}`.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, *, on_enter: Callable[[str], None] | None = None
    ) -> None:
        """`on_enter` is called with each name as its block begins."""
        self._clock = clock
        self._on_enter = on_enter
        self._phases: dict[str, _Phase] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block under a name."""
        phase = self._phases.setdefault(name, _Phase())
        if phase.open_blocks == 0:
            phase.opened_at = self._clock()
        phase.open_blocks += 1
        if self._on_enter is not None:
            self._on_enter(name)
        try:
            yield
        finally:
            phase.open_blocks -= 1
            if phase.open_blocks == 0:
                phase.closed_s += self._clock() - phase.opened_at

    def seconds(self) -> dict[str, float]:
        """Return seconds by name, in the order of first use; an open block counts until now."""
        now = self._clock()
        return {name: p.closed_s + (now - p.opened_at if p.open_blocks else 0.0) for name, p in self._phases.items()}
