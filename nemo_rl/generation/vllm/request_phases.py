"""Phases of vLLM's requests and figures of its scheduler, for a run that is traced."""

from typing import Any

from nemo_rl.tracing import record_counter
from nemo_rl.types import RequestPhases


def to_phases(stats: Any) -> RequestPhases | None:
    """Return the phases of a finished request from vLLM's RequestStateStats; None for one that was never scheduled."""
    if stats is None or not 0 < stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts:
        return None
    return RequestPhases(
        stats.scheduled_ts - stats.queued_ts,
        stats.first_token_ts - stats.scheduled_ts,
        stats.last_token_ts - stats.first_token_ts,
    )


class SchedulerCounters:
    """Records an engine's counters each time that one changes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: dict[str, float] = {}

    def record(self, stats: Any) -> None:
        """Record the numbers of vLLM's SchedulerStats; None: nothing."""
        if stats is None:
            return
        values = {
            "running_requests": stats.num_running_reqs,
            "waiting_requests": stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            "kv_cache_usage": round(stats.kv_cache_usage, 3),
        }
        for name, value in values.items():
            if self._last.get(name) != value:
                self._last[name] = value
                record_counter(f"{self._name}/{name}", value)
