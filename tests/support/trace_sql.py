"""A trace in SQL, under the names of Perfetto's tables; reads Chrome trace events without any code of the project."""

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

TABLES = """
create table process (upid integer primary key, name text);
create table slice (ts real, dur real, upid integer, tid integer, category text, name text, args text);
create table counter (ts real, name text, value real);
"""
ARGS = """
create table args as
  select rowid as slice_id, json_extract(args, '$.span_id') as span_id, json_extract(args, '$.parent_id') as parent_id,
         json_extract(args, '$.trace_id') as trace_id, json_extract(args, '$.step') as step from slice;
create index args_of_slices on args (slice_id);
create index spans on args (span_id);
"""


def open_trace(path: Path) -> sqlite3.Connection:
    """Return a database of the trace's slices and counters; times are in seconds."""
    text = gzip.decompress(path.read_bytes()).decode()
    events: list[dict[str, Any]] = json.loads(text.rstrip().rstrip(",") + "]")
    database = sqlite3.connect(":memory:")
    database.executescript(TABLES)
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            database.execute("insert or replace into process values (?, ?)", (event["pid"], event["args"]["name"]))
        elif event["ph"] == "C":
            row = event["ts"] / 1e6, event["name"], event["args"]["value"]
            database.execute("insert into counter values (?, ?, ?)", row)
        elif event["ph"] == "X":
            times = event["ts"] / 1e6, event["dur"] / 1e6
            row = event["pid"], event["tid"], event.get("cat", ""), event["name"], json.dumps(event.get("args", {}))
            database.execute("insert into slice values (?, ?, ?, ?, ?, ?, ?)", (*times, *row))
    database.executescript(ARGS)
    return database


def ask(database: sqlite3.Connection, question: str) -> Any:
    """Return the one value that a question has."""
    return database.execute(question).fetchone()[0]
