"""The record of a run in its directory, `run.json`: its name, tags and notes, and each start with how it ended."""

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from nemo_rl.config.shared_sections import LoggerConfig
from nemo_rl.durable_files import is_held, replace_text
from nemo_rl.errors import conceal, summarize_error

RECORD_FILE = "run.json"
MAX_TIME_S = 1e11  # since 1970: beyond the year 5000

RunState: TypeAlias = Literal["running", "ended", "interrupted", "failed", "died"]


@dataclass(frozen=True, slots=True)
class RunStart:
    """One start of a run: the first one, or one that resumed it."""

    started_at: float  # seconds since 1970
    host: str
    pid: int
    state: RunState = "running"
    cause: str = ""  # if "failed": the error's type and the first line of its text
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Content of `run.json`."""

    name: str  # logger.run_name, or that of the directory
    tags: tuple[str, ...] = ()
    notes: str = ""
    starts: tuple[RunStart, ...] = ()

    @property
    def last(self) -> RunStart | None:
        """Return the last start; None for a record without one."""
        return self.starts[-1] if self.starts else None


@contextlib.contextmanager
def recorded_run(
    run_dir: Path, section: LoggerConfig, *, is_interrupted: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Record a start of the run in `run_dir`, whose lock this process holds, and how it ended, when the block ends.

    `is_interrupted` tells after a block without an error whether somebody asked it to stop.
    """
    before = read_run_record(run_dir) or RunRecord(run_dir.name)
    record = RunRecord(
        name=section.run_name or before.name,
        tags=tuple(section.tags) or before.tags,
        notes=section.notes or before.notes,
    )
    starts = tuple(map(_as_died, before.starts))  # their processes would hold the lock
    own = RunStart(time.time(), socket.gethostname(), os.getpid())
    _write(run_dir, replace(record, starts=(*starts, own)))
    state: RunState = "failed"
    cause = ""
    try:
        yield
        state = "interrupted" if is_interrupted() else "ended"
    except (KeyboardInterrupt, asyncio.CancelledError):
        state = "interrupted"
        raise
    except BaseException as error:
        cause = conceal(summarize_error(_first_leaf(error)))
        raise
    finally:
        ended = replace(own, state=state, cause=cause, ended_at=time.time())
        _write(run_dir, replace(record, starts=(*starts, ended)))


def read_run_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a run; None if it has none that can be read.

    The state of a start without a recorded end is "died" once no process holds the directory; "running" if that
    cannot be known here: on another host, or if locks do not work.
    """
    try:
        values = json.loads((run_dir / RECORD_FILE).read_text(encoding="utf-8"))
        record = _parse(values)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    last = record.last
    if last is None or last.host != socket.gethostname() or is_held(run_dir) is not False:
        return record
    return replace(record, starts=(*record.starts[:-1], _as_died(last)))


def _as_died(start: RunStart) -> RunStart:
    """Return a start whose process is gone: "died" if no end was recorded."""
    return replace(start, state="died") if start.state == "running" else start


def _parse(values: Mapping[str, Any]) -> RunRecord:
    """Return the record that JSON values describe; raises TypeError, KeyError or ValueError for others."""
    tags, starts = values["tags"], values["starts"]
    record = RunRecord(values["name"], tuple(tags), values["notes"], tuple(RunStart(**start) for start in starts))
    texts = (record.name, record.notes, *record.tags)
    if not isinstance(tags, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("name, tags and notes are not texts")
    if not all(map(_is_valid, record.starts)):
        raise ValueError("a start has a value of another type, or an impossible time")
    return record


def _is_valid(start: RunStart) -> bool:
    texts = (start.host, start.cause, start.state)
    times = (start.started_at, start.started_at if start.ended_at is None else start.ended_at)
    return (
        all(isinstance(text, str) for text in texts)
        and start.state in get_args(RunState)
        and type(start.pid) is int
        and all(type(time_s) in (int, float) and 0 <= time_s < MAX_TIME_S for time_s in times)
    )


def _write(run_dir: Path, record: RunRecord) -> None:
    """Replace the file; a full disk must not end the run."""
    with contextlib.suppress(OSError):
        replace_text(run_dir / RECORD_FILE, json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n")


def _first_leaf(error: BaseException) -> BaseException:
    """Return the first error of a group, which says what happened; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
