"""`trace.json.gz` of a run: its spans and counters as Chrome trace events, which Perfetto opens.

The format (Trace Event Format, by the Chromium project) is an array of objects, here one per line, whose closing
bracket may be missing. Each write appends a whole gzip member (RFC 1952), so the file of a killed run can be read up to
its last write.
"""

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.durable_files import append_whole
from nemo_rl.tracing import CounterRecord, SpanRecord, TraceRecord

TRACE_FILE = "trace.json.gz"
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
MAX_TRACKS = 100  # of a process: ids that its tracks have as processes of the format; a resumed run has others


class TraceFile:
    """A sink that appends to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._process_ids: dict[str, int] = {}  # by track
        self._named_lanes: set[tuple[str, int]] = set()
        if os.fstat(self._file).st_size == 0:
            self._append("[\n")

    def write(self, records: Sequence[TraceRecord]) -> None:
        """Append the records as events; raises OSError if the disk takes only a part, and leaves the file as it was."""
        self._append("".join([line for record in records for line in self._lines(record)]))

    def close(self) -> None:
        os.close(self._file)

    def _append(self, text: str) -> None:
        append_whole(self._file, gzip.compress(text.encode(), compresslevel=1))

    def _lines(self, record: TraceRecord) -> Iterator[str]:
        """Yield the events of a record. They are formatted by hand: `json.dumps` takes three times as long."""
        if isinstance(record, CounterRecord):
            yield _line("C", record.name, 0, ts=record.at_ns / 1000, args={"value": record.value})
            return
        key = record.track, record.lane
        if key not in self._named_lanes:
            self._named_lanes.add(key)
            yield from self._names(record)
        names = ",".join([f"{_ENCODE(name)}:{_ENCODE(value)}" for name, value in record.attributes.items()])
        yield (
            f'{{"ph":"X","name":{_ENCODE(record.name)},"ts":{record.start_ns / 1000},'
            f'"dur":{(record.end_ns - record.start_ns) / 1000},"pid":{self._process_ids[record.track]},'
            f'"tid":{record.lane},"args":{{"trace_id":"{record.trace_id:032x}","span_id":"{record.span_id:016x}",'
            f'"parent_id":"{record.parent_id:016x}"{"," if names else ""}{names}}}}},\n'
        )

    def _names(self, record: SpanRecord) -> Iterator[str]:
        """Yield the events that name the record's track, unless it is known, and its lane."""
        track, lane = record.track, record.lane
        if track not in self._process_ids:
            pid = self._process_ids[track] = os.getpid() * MAX_TRACKS + len(self._process_ids)
            yield _line("M", "process_name", pid, tid=0, args={"name": track})
        yield _line("M", "thread_name", self._process_ids[track], tid=lane, args={"name": f"{track} {lane}"})


def _line(kind: str, name: str, pid: int, **fields: Any) -> str:
    return _ENCODE({"ph": kind, "name": name, "pid": pid, **fields}) + ",\n"


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """Yield the records of a trace in the order in which they ended; one cut short ends with its last whole write.

    Raises ValueError for a line that is no event of this format, with its number.
    """
    tracks: dict[int, str] = {}
    for number, line in enumerate(_read_lines(path), 1):
        text = line.strip().rstrip(",")
        if text in ("[", "]", ""):
            continue
        try:
            event = json.loads(text)
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    tracks[event["pid"]] = str(event["args"]["name"])
            elif event["ph"] == "C":
                yield CounterRecord(str(event["name"]), round(event["ts"] * 1000), float(event["args"]["value"]))
            else:
                yield _to_span(event, tracks)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not an event of a trace of this project: {text:.80}") from error


def _to_span(event: dict[str, Any], tracks: dict[int, str]) -> SpanRecord:
    attributes = dict(event["args"])
    trace_id, span_id, parent_id = (int(attributes.pop(name), 16) for name in ("trace_id", "span_id", "parent_id"))
    name, track, lane = str(event["name"]), tracks[event["pid"]], int(event["tid"])
    start_ns = round(event["ts"] * 1000)
    end_ns = start_ns + round(event["dur"] * 1000)
    return SpanRecord(name, track, lane, start_ns, end_ns, trace_id, span_id, parent_id, attributes)


def _read_lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        try:
            yield from file
        except (EOFError, gzip.BadGzipFile):  # the last write was cut short
            return
