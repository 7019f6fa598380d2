"""Spans: whom they belong to, where they stand on a timeline, and what happens if a sink fails."""

import asyncio
from collections.abc import Sequence

import pytest

from nemo_rl import tracing
from nemo_rl.tracing import (
    NO_SPAN,
    SpanRecord,
    Tracer,
    TraceRecord,
    record_part,
    span,
    trace_environment,
    trace_headers,
    within,
)
from tests.support.kept_spans import kept_spans


class KeepingSink:
    def __init__(self) -> None:
        self.spans: dict[str, SpanRecord] = {}
        self.is_closed = False

    def write(self, records: Sequence[TraceRecord]) -> None:
        self.spans |= {record.name: record for record in records if isinstance(record, SpanRecord)}

    def close(self) -> None:
        self.is_closed = True


class FailingSink(KeepingSink):
    def write(self, records: Sequence[TraceRecord]) -> None:
        raise OSError("no room")


def test_without_a_tracer_a_span_is_nothing() -> None:
    assert span("step") is NO_SPAN
    with span("step"):
        assert trace_headers() == {} == trace_environment()


def test_spans_belong_to_the_span_of_the_task_that_began_them() -> None:
    sink = KeepingSink()

    async def child(name: str) -> None:
        with span(name):
            await asyncio.sleep(0)

    async def main() -> None:
        with span("parent"):
            tasks = [asyncio.create_task(child(name)) for name in ("first", "second")]
            await asyncio.gather(*tasks)
        with span("other"):
            pass

    with Tracer([sink]):
        asyncio.run(main())
    parent = sink.spans["parent"]
    assert parent.parent_id == 0
    for name in ("first", "second"):
        assert (sink.spans[name].parent_id, sink.spans[name].trace_id) == (parent.span_id, parent.trace_id)
    assert sink.spans["other"].trace_id != parent.trace_id
    assert sink.is_closed


def test_spans_of_a_lane_nest_and_a_free_lane_is_taken_again() -> None:
    sink = KeepingSink()
    with Tracer([sink]):
        first, second = span("first", "rollouts"), span("second", "rollouts")
        with first.current():
            inner = span("inner")
            beside = span("beside")  # overlaps `inner`: not in its lane
        inner.end()
        beside.end()
        first.end()
        span("third", "rollouts").end()
        second.end()
    assert {name: (s.track, s.lane) for name, s in sink.spans.items()} == {
        "first": ("rollouts", 0),
        "second": ("rollouts", 1),
        "inner": ("rollouts", 0),
        "beside": ("rollouts", 2),
        "third": ("rollouts", 0),
    }


def test_a_span_that_overlaps_its_sibling_has_another_lane() -> None:
    sink = KeepingSink()
    with Tracer([sink]):
        parent = span("parent")
        with parent.current():
            one = span("one")
        with parent.current():
            two = span("two")
        one.end()
        two.end()
        parent.end()
    lanes = [sink.spans[name].lane for name in ("parent", "one", "two")]
    assert lanes == [0, 0, 1]


def test_parts_that_were_timed_elsewhere_follow_their_span_and_stay_within_it() -> None:
    with kept_spans() as kept, span("call", "rollouts"):
        begin = tracing.now_ns()
        record_part("queue", 0, begin)  # it began earlier, on another clock
        record_part("decode", begin, begin + 5)
    call, *parts = kept.spans
    assert [part.name for part in parts] == ["queue", "decode"]
    assert [(part.track, part.lane, part.span_id, part.parent_id) for part in parts] == 2 * [
        ("rollouts", call.lane, 0, call.span_id)
    ]
    assert [(part.start_ns, part.end_ns) for part in parts] == [(call.start_ns, begin), (begin, begin + 5)]


def test_a_request_names_the_current_span_as_w3c_trace_context_does() -> None:
    sink = KeepingSink()
    with Tracer([sink]), span("call"):
        headers, environment = trace_headers(), trace_environment()
        context = tracing.current_context()
    record = sink.spans["call"]
    assert headers == {"traceparent": f"00-{record.trace_id:032x}-{record.span_id:016x}-01"}
    assert environment == {"TRACEPARENT": headers["traceparent"]}
    assert context is not None
    assert context.span_id == record.span_id


def test_what_goes_on_in_another_context_belongs_to_the_named_span() -> None:
    sink = KeepingSink()
    with Tracer([sink]):
        rollout = span("rollout")
        with rollout.current():
            context = tracing.current_context()
        with within(context), span("call", "gateway"):
            pass
        rollout.end()
    assert sink.spans["call"].parent_id == sink.spans["rollout"].span_id


def test_a_span_keeps_the_type_of_the_error_that_ended_it() -> None:
    sink = KeepingSink()
    with Tracer([sink]), pytest.raises(ValueError, match="wrong"), span("work"):
        raise ValueError("wrong")
    assert sink.spans["work"].attributes == {"error.type": "ValueError"}


def test_a_sink_that_fails_is_left_out_and_the_others_go_on() -> None:
    sink, failing = KeepingSink(), FailingSink()
    with Tracer([failing, sink]) as tracer:
        span("one").end()
    assert list(sink.spans) == ["one"]
    assert [(sink, str(error)) for sink, error in tracer.errors] == [(failing, "no room")]


def test_records_that_come_faster_than_they_are_written_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_PENDING", 2)
    monkeypatch.setattr(tracing, "FLUSH_S", 60.0)
    sink = KeepingSink()
    with Tracer([sink]) as tracer:
        for name in ("one", "two", "three"):
            span(name).end()
    assert list(sink.spans) == ["one", "two"]
    assert tracer.num_dropped == 1


def test_two_tracers_in_a_process_are_refused() -> None:
    with Tracer([]), pytest.raises(RuntimeError, match="open in this process"), Tracer([]):
        pass
