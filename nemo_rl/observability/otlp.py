"""A trace's spans to an OpenTelemetry collector, by OTLP over HTTP (https://opentelemetry.io/docs/specs/otlp/)."""

import time
from collections.abc import Sequence
from random import getrandbits

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from nemo_rl.tracing import GENERATION, SpanRecord, TraceRecord

PROVIDER = "nemo-rl"  # the run serves its own model
TIMEOUT_S = 10.0  # deadline of one export
BATCH_SIZE = 512


class OtlpSink:
    """A sink that sends spans, but no counters."""

    def __init__(self, endpoint: str, run_name: str, model_name: str) -> None:
        """`model_name`: the model that spans of generation call."""
        self._model_name = model_name
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._resource = Resource({"service.name": "nemo-rl", "rl.run": run_name})
        self._scope = InstrumentationScope("nemo_rl")
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def write(self, records: Sequence[TraceRecord]) -> None:
        """Send the spans; raises OSError if the collector does not take them."""
        spans = [self._to_readable(record) for record in records if isinstance(record, SpanRecord)]
        for start in range(0, len(spans), BATCH_SIZE):
            if self._exporter.export(spans[start : start + BATCH_SIZE]) is not SpanExportResult.SUCCESS:
                raise OSError("the collector of logger.trace.otlp_endpoint did not take the spans")

    def close(self) -> None:
        self._exporter.shutdown()

    def _model_call(self, record: SpanRecord) -> dict[str, AttributeValue]:
        """Return the attributes of a call of the model, by OpenTelemetry's conventions for generative AI."""
        if record.name != GENERATION:
            return {}
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "chat" if record.track == "gateway" else "text_completion",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model_name,
        }
        if "finish_reason" in record.attributes:  # one request that was answered
            found["gen_ai.usage.input_tokens"] = record.attributes["num_prompt_tokens"]
            found["gen_ai.usage.output_tokens"] = record.attributes["num_sampled_tokens"]
            found["gen_ai.response.finish_reasons"] = (str(record.attributes["finish_reason"]),)
        return found

    def _to_readable(self, record: SpanRecord) -> ReadableSpan:
        def context(span_id: int) -> SpanContext:
            return SpanContext(record.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        error = record.attributes.get("error.type")
        return ReadableSpan(
            name=record.name,
            context=context(record.span_id or getrandbits(64)),
            parent=context(record.parent_id) if record.parent_id else None,
            resource=self._resource,
            attributes={"rl.track": record.track, **self._model_call(record), **record.attributes},
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, str(error)),
            start_time=record.start_ns + self._epoch_ns,
            end_time=record.end_ns + self._epoch_ns,
            instrumentation_scope=self._scope,
        )
