"""What the terminal shows while rollouts are collected: a bar with rate, time left, mean reward and failures."""

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from nemo_rl.observability.progress import format_duration
from nemo_rl.types import Trajectory

logger = logging.getLogger(__name__)

LINE_PERIOD_S = 10.0  # of log lines, where there is no terminal
WINDOW_S = 30.0  # the rate is that of about so many last seconds


class CollectionProgress:
    """Counts rollouts as they end, and says so in the log."""

    def __init__(self, *, total: int, num_finished: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_finished` of `total` are there from an earlier start."""
        self.total = total
        self.num_finished = num_finished
        self.num_new = 0
        self.num_failures = 0  # attempts
        self._rewards = 0.0
        self._clock = clock
        self._started_at = self._last_log_at = self._window_started_at = clock()
        self._window_start_count = 0  # of `num_new`, at `_window_started_at`
        self._previous_rate: float | None = None

    @property
    def mean_reward(self) -> float | None:
        """Of the rollouts of this start."""
        return self._rewards / self.num_new if self.num_new else None

    @property
    def seconds(self) -> float:
        return self._clock() - self._started_at

    def start(self) -> None:
        """Rollouts begin; what was read before takes no part in the rate."""
        self._started_at = self._last_log_at = self._window_started_at = self._clock()

    def rollout(self, trajectory: Trajectory) -> None:
        if trajectory.failure is None:
            self.num_new += 1
            self.num_finished += 1
            self._rewards += trajectory.reward
        else:
            self.num_failures += 1
        self._report()

    def close(self) -> None:
        """The terminal is free again."""

    def line(self) -> str:
        """Example: "31% | 215/s | ETA 0:13 | reward 0.263 | 3 failed attempts"."""
        share = 100 * self.num_finished // max(self.total, 1)
        rate = self._rate()
        left = format_duration((self.total - self.num_finished) / rate) if rate else "unknown"
        reward = "" if self.mean_reward is None else f" | reward {self.mean_reward:.3f}"
        failures = f" | {self.num_failures} failed attempts" if self.num_failures else ""
        return f"{share}% | {rate:,.3g}/s | ETA {left}{reward}{failures}"

    def _rate(self) -> float:
        """Finished rollouts a second, of the window under way and the one before it."""
        now = self._clock()
        if now - self._window_started_at >= WINDOW_S:
            self._previous_rate = (self.num_new - self._window_start_count) / (now - self._window_started_at)
            self._window_start_count, self._window_started_at = self.num_new, now
        elapsed = now - self._window_started_at
        current = (self.num_new - self._window_start_count) / elapsed if elapsed > 0 else 0.0
        if self._previous_rate is None:
            return current
        share = elapsed / WINDOW_S
        return share * current + (1 - share) * self._previous_rate

    def _report(self) -> None:
        if self._clock() - self._last_log_at >= LINE_PERIOD_S:
            self._last_log_at = self._clock()
            logger.info("%d/%d rollouts, %s", self.num_finished, self.total, self.line())


class LiveCollectionProgress(CollectionProgress):
    """The same as a bar on a terminal, below the log records of the same console."""

    def __init__(self, console: Console, *, total: int, num_finished: int) -> None:
        super().__init__(total=total, num_finished=num_finished)
        self._bar = Progress(
            TextColumn("rollouts"),
            BarColumn(40),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total, completed=num_finished, note="")
        self._last_update_at = 0.0

    def start(self) -> None:
        super().start()
        self._bar.start()

    def close(self) -> None:
        self._update()
        self._bar.stop()

    def _report(self) -> None:
        if self._clock() - self._last_update_at >= 0.25:
            self._last_update_at = self._clock()
            self._update()

    def _update(self) -> None:
        self._bar.update(self._task, completed=self.num_finished, note=self.line())


def make_collection_progress(console: Console, *, wanted: bool, total: int, num_finished: int) -> CollectionProgress:
    """The bar where it is wanted and `console` is a terminal."""
    if wanted and console.is_terminal:
        return LiveCollectionProgress(console, total=total, num_finished=num_finished)
    return CollectionProgress(total=total, num_finished=num_finished)
