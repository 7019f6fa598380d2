"""Profiles of chosen steps: torch's events, which are Chrome trace events too, beside the run's spans in one file."""

import gzip
import json
import os
import time
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_rl.config.shared_sections import ProfileConfig
from nemo_rl.durable_files import append_whole
from nemo_rl.observability.trace_file import PROFILE, encode_event

EVENTS_PER_WRITE = 20_000
FIRST_PROCESS = 1 << 30  # ids of a profile's processes, above those of the run's own tracks
PROCESSES_PER_FILE = 1000


def profile_directory(section: ProfileConfig, run_dir: Path) -> Path | None:
    """Return where the profiles of a run go; None if it makes none."""
    return run_dir / "profiles" if section.steps else None


def append_profile(trace: Path, profile: Path) -> int:
    """Append a profile that torch has written to a run's trace, on its clock; return the number of events.

    Raises ValueError for a file that torch has not written, OSError if the disk takes only a part.
    """
    file = os.open(trace, os.O_WRONLY | os.O_APPEND)
    count = 0
    try:
        remaining = _events(profile)
        while lines := [encode_event(event) for event in islice(remaining, EVENTS_PER_WRITE)]:
            append_whole(file, gzip.compress("".join(lines).encode(), compresslevel=1))
            count += len(lines)
    finally:
        os.close(file)
    return count


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a profile's events with the processes and the clock of the trace."""
    try:
        profile = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        base_ns = int(profile.get("baseTimeNanoseconds", 0)) - (time.time_ns() - time.monotonic_ns())
        events = profile["traceEvents"]
    except (ValueError, KeyError, AttributeError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no profile of torch: {type(error).__name__}: {error}") from error
    name = path.name.split(".")[0]
    first = FIRST_PROCESS + zlib.crc32(path.name.encode()) % 1_000_000 * PROCESSES_PER_FILE
    processes: dict[Any, int] = {}
    for event in events:
        own = processes.setdefault(event.get("pid"), first + len(processes))
        moved = {**event, "cat": f"{PROFILE},{event.get('cat', '')}", "pid": own}
        if "ts" in event:
            moved["ts"] = (event["ts"] * 1000 + base_ns) / 1000
        if event.get("name") == "process_name":
            moved["args"] = {"name": f"{name}: {event['args'].get('name', '')}"}
        yield moved


def find_profiles(directory: Path) -> set[Path]:
    return {path for path in directory.glob("*.json*") if path.is_file()}
