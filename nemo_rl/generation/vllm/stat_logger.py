"""Counters of a vLLM engine in a process of its own, into the trace. Imports vLLM."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from nemo_rl.generation.vllm.request_phases import SchedulerCounters


class TraceStatLogger(StatLoggerBase):
    """Records what vLLM tells after each step of its scheduler."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._counters = SchedulerCounters("engine")

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._counters.record(scheduler_stats)

    def log_engine_initialized(self) -> None:
        """Do nothing."""
