"""trace.json.gz: what is written is read back, by us and by anyone who knows JSON; a killed run's file is readable."""

import gzip
import json
import os
from pathlib import Path

import pytest

from nemo_rl.observability.trace_file import TraceFile, read_trace
from nemo_rl.tracing import CounterRecord, SpanRecord

SPANS = [
    SpanRecord("generation", "rollouts", 3, 1_000_000_123, 1_500_000_456, 2**127 + 1, 2**63 + 5, 7, {"count": 1}),
    SpanRecord("policy_training", "driver", 0, 2_000_000_000, 2_000_001_000, 5, 6, 0, {"step": 4, "é": "ü"}),
]
PARTS = [
    SpanRecord("decode", "rollouts", 3, 1_400_000_123, 1_500_000_003, 2**127 + 1, 0, 2**63 + 5, {}),
    SpanRecord("prefill", "rollouts", 3, 1_400_000_000, 1_400_000_123, 2**127 + 1, 0, 2**63 + 5, {}),
]
COUNTER = CounterRecord("replay_buffer/size", 1_700_000_000, 12.0)


def write(path: Path, *writes: list) -> None:
    file = TraceFile(path)
    for records in writes:
        file.write(records)
    file.close()


def test_records_are_read_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write(path, [SPANS[0], *PARTS, COUNTER], [SPANS[1]])
    assert list(read_trace(path)) == [[SPANS[0], *PARTS, COUNTER, SPANS[1]]]


def test_each_start_of_a_run_has_its_own_records(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write(path, [SPANS[0]])
    write(path, [SPANS[1]], [COUNTER])
    assert list(read_trace(path)) == [[SPANS[0]], [SPANS[1], COUNTER]]


def test_the_file_is_an_array_of_trace_events_once_it_is_closed_with_a_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write(path, SPANS)
    events = json.loads(gzip.decompress(path.read_bytes()).decode().rstrip().rstrip(",") + "]")
    assert events[0] == {"ph": "M", "name": "start", "pid": os.getpid(), "args": {}}
    names = {(e["ph"], e["name"], e["args"].get("name")) for e in events[1:] if e["ph"] == "M"}
    assert names == {
        ("M", "process_name", "rollouts"),
        ("M", "thread_name", "rollouts 3"),
        ("M", "process_name", "driver"),
        ("M", "thread_name", "driver 0"),
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("generation", 1_000_000.123, 500_000.333),
        ("policy_training", 2_000_000.0, 1.0),
    ]
    assert spans[0]["pid"] != spans[1]["pid"]


def test_a_part_without_its_span_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write(path, [COUNTER, PARTS[0]])
    with pytest.raises(ValueError, match="not an event of a trace of this project"):
        list(read_trace(path))


def test_a_write_that_is_cut_anywhere_takes_no_other_with_it(tmp_path: Path) -> None:
    """As when the machine dies in a write, and the run is resumed."""
    path = tmp_path / "trace.json.gz"
    write(path, [SPANS[0]])
    whole = path.read_bytes()
    write(path, [COUNTER])
    cut = path.read_bytes()[len(whole) :]
    path.unlink()
    write(path, [SPANS[1]])
    resumed = path.read_bytes()
    for size in range(len(cut)):
        path.write_bytes(whole + cut[:size])
        assert [SPANS[0]] in list(read_trace(path))
        path.write_bytes(whole + cut[:size] + resumed)
        records = [record for start in read_trace(path) for record in start]
        assert records[0] == SPANS[0]
        assert records[-1] == SPANS[1]


def test_a_damaged_byte_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write(path, [SPANS[0]], [SPANS[1]])
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        for records in read_trace(path):
            assert all(record in SPANS for record in records)


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'[\n{"ph": "X"},\n'))
    with pytest.raises(ValueError, match=r"not an event .*\"ph\": \"X\""):
        list(read_trace(path))
