"""`trace.json.gz` of a run: its spans and counters as Chrome trace events, which Perfetto opens.

The format (Trace Event Format, by the Chromium project) is an array of objects, here one per line, whose closing
bracket may be missing. Each write appends a whole gzip member (RFC 1952), so the file of a killed run can be read up to
its last write. An event without `args` is a part of the span before it.
"""

import gzip
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl.durable_files import append_whole
from nemo_rl.tracing import AttributeValue, CounterRecord, SpanRecord, TraceRecord

TRACE_FILE = "trace.json.gz"
GZIP_HEADER = b"\x1f\x8b\x08"  # a member's magic and method of compression (RFC 1952, section 2.3)
CHUNK = 1 << 16  # bytes that are decompressed at once
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
PROFILE = "profile"  # first category of events that come from a profile (profiles.py)
START = "start"  # name of the event with which each process that writes the file begins
MAX_TRACKS = 100  # per process: ids that its tracks have as processes of the format; a resumed run has others


class TraceFile:
    """A sink that appends to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._process_ids: dict[str, int] = {}  # by track
        self._named_lanes: set[tuple[str, int]] = set()
        self._append(("" if os.fstat(self._file).st_size else "[\n") + _line("M", START, os.getpid(), args={}))

    def write(self, records: Sequence[TraceRecord]) -> None:
        """Append the records as events; raises OSError if the disk takes only a part, and leaves the file as it was."""
        self._append("".join([self._format(record) for record in records]))

    def close(self) -> None:
        os.close(self._file)

    def _append(self, text: str) -> None:
        append_whole(self._file, gzip.compress(text.encode(), compresslevel=1))

    def _format(self, record: TraceRecord) -> str:
        """Return the events of a record. They are formatted by hand: `json.dumps` takes three times as long."""
        if isinstance(record, CounterRecord):
            return _line("C", record.name, 0, ts=record.at_ns / 1000, args={"value": record.value})
        name, track, lane, start_ns, end_ns, trace_id, span_id, parent_id, attributes = record
        names = "" if (track, lane) in self._named_lanes else self._names(track, lane)
        arguments = ""
        if span_id:
            own = "".join([f",{_encode_name(key)}:{_encode_value(value)}" for key, value in attributes.items()])
            arguments = (
                f',"args":{{"trace_id":"{_encode_trace_id(trace_id)}","span_id":"{span_id:016x}",'
                f'"parent_id":"{parent_id:016x}"{own}}}'
            )
        length_ns = end_ns - start_ns
        return (
            f'{names}{{"ph":"X","name":{_encode_name(name)},"ts":{start_ns // 1000}.{start_ns % 1000:03},'
            f'"dur":{length_ns // 1000}.{length_ns % 1000:03},"pid":{self._process_ids[track]},"tid":{lane}'
            f"{arguments}}},\n"
        )

    def _names(self, track: str, lane: int) -> str:
        """Return the events that name a track, unless it is known, and a new lane of it."""
        self._named_lanes.add((track, lane))
        names = ""
        if track not in self._process_ids:
            pid = self._process_ids[track] = os.getpid() * MAX_TRACKS + len(self._process_ids)
            names = _line("M", "process_name", pid, tid=0, args={"name": track})
        return names + _line("M", "thread_name", self._process_ids[track], tid=lane, args={"name": f"{track} {lane}"})


_encode_trace_id = lru_cache(maxsize=1024)("{:032x}".format)
_encode_name = lru_cache(maxsize=1024)(encode_basestring_ascii)


def _encode_value(value: AttributeValue) -> str:
    """Return the JSON text of an attribute; texts and integers, which most are, without a call of the encoder."""
    if type(value) is str:
        return encode_basestring_ascii(value)
    return str(value) if type(value) is int else _ENCODE(value)


def _line(kind: str, name: str, pid: int, **fields: Any) -> str:
    return encode_event({"ph": kind, "name": name, "pid": pid, **fields})


def encode_event(event: Mapping[str, Any]) -> str:
    """Return the line of an event."""
    return _ENCODE(event) + ",\n"


def read_trace(path: Path) -> Iterator[list[TraceRecord]]:
    """Yield the records of each start of the run, in the order in which they ended; clocks of two starts may differ.

    Events of profiles are skipped.

    A write that was cut short is skipped. Raises ValueError for a line that is no event of this format.
    """
    tracks: dict[int, str] = {}
    records: list[TraceRecord] = []
    for line in _read_lines(path):
        text = line.strip().rstrip(",")
        if text in ("[", "]", ""):
            continue
        try:
            event = json.loads(text)
            if str(event.get("cat", "")).startswith(PROFILE):
                continue
            if event["ph"] == "M" and event["name"] == START:
                if records:
                    yield records
                records, tracks = [], {}
            elif event["ph"] == "M":
                if event["name"] == "process_name":
                    tracks[event["pid"]] = str(event["args"]["name"])
            else:
                records.append(_to_record(event, tracks, records))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not an event of a trace of this project: {text:.80}") from error
    if records:
        yield records


def _to_record(event: dict[str, Any], tracks: dict[int, str], before: Sequence[TraceRecord]) -> TraceRecord:
    if event["ph"] == "C":
        return CounterRecord(str(event["name"]), round(event["ts"] * 1000), float(event["args"]["value"]))
    attributes = dict(event.get("args", {}))
    if attributes:
        trace_id, span_id, parent_id = (int(attributes.pop(name), 16) for name in ("trace_id", "span_id", "parent_id"))
        return _to_span(event, tracks, (trace_id, span_id, parent_id), attributes)
    last = before[-1] if before else None
    if not isinstance(last, SpanRecord):
        raise ValueError("a part without a span")
    return _to_span(event, tracks, (last.trace_id, 0, last.span_id or last.parent_id), {})


def _to_span(
    event: dict[str, Any], tracks: dict[int, str], identity: tuple[int, int, int], attributes: dict[str, AttributeValue]
) -> SpanRecord:
    name, track, lane = str(event["name"]), tracks[event["pid"]], int(event["tid"])
    start_ns = round(event["ts"] * 1000)
    end_ns = start_ns + round(event["dur"] * 1000)
    return SpanRecord(name, track, lane, start_ns, end_ns, *identity, attributes)


def _read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of all whole members; after one that was cut short it continues with the next."""
    with path.open("rb") as file, _mapped(file) as data:
        at = 0
        while at < len(data):
            text, end = _read_member(data, at)
            if text is None:
                at = data.find(GZIP_HEADER, at + 1)
                if at < 0:
                    return
            else:
                yield from text.decode(errors="replace").splitlines()
                at = end


def _mapped(file: BinaryIO) -> AbstractContextManager[Any]:
    """Return the file's bytes; an empty file cannot be mapped."""
    if os.fstat(file.fileno()).st_size == 0:
        return nullcontext(b"")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _read_member(data: Any, start: int) -> tuple[bytes | None, int]:
    """Return the text of the gzip member that begins there and the place after it; None if it is not whole."""
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    parts, at = [], start
    try:
        while not decompressor.eof and at < len(data):
            parts.append(decompressor.decompress(data[at : at + CHUNK]))
            at = min(at + CHUNK, len(data))
    except zlib.error:
        return None, start
    return (b"".join(parts), at - len(decompressor.unused_data)) if decompressor.eof else (None, start)
