"""The trace of a run as its configuration asks for it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.config.shared_sections import TraceConfig
from nemo_rl.errors import ConfigError
from nemo_rl.observability.lost_records import LostRecords
from nemo_rl.observability.trace_file import TRACE_FILE, TraceFile
from nemo_rl.tracing import Tracer, TraceSink

logger = logging.getLogger(__name__)


@contextmanager
def open_trace(section: TraceConfig, run_dir: Path, lost: LostRecords, *, model_name: str) -> Iterator[None]:
    """Trace the run of a model until the block ends; `lost` counts a file that could not be written, not a collector.

    Raises ConfigError if spans are to be sent and OpenTelemetry's exporter is not installed.
    """
    if not section.enabled:
        yield
        return
    sinks: list[TraceSink] = [TraceFile(run_dir / TRACE_FILE)]
    if section.otlp_endpoint is not None:
        sinks.append(_open_otlp(section.otlp_endpoint, run_dir.name, model_name))
    tracer = Tracer(sinks, collector=section.otlp_endpoint)
    try:
        with tracer:
            yield
    finally:
        for sink, error in tracer.errors:
            if isinstance(sink, TraceFile):
                lost.add(TRACE_FILE)
            logger.warning("a part of the trace is lost: %r", error)
        if tracer.num_dropped:
            logger.warning("%d records of the trace came faster than they could be written", tracer.num_dropped)


def _open_otlp(endpoint: str, run_name: str, model_name: str) -> TraceSink:
    try:
        from nemo_rl.observability.otlp import OtlpSink  # imports the SDK
    except ImportError as error:
        problem = "needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, which are not installed"
        raise ConfigError("logger.trace.otlp_endpoint", endpoint, problem) from error
    return OtlpSink(endpoint, run_name, model_name)
