"""A run or collection in a line: name, state with its cause, dates, model, data."""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from nemo_rl.durable_files import is_held
from nemo_rl.observability.run_record import RunStart, RunState
from nemo_rl.viewer.viewer_sources import ViewerSource, last_written

State: TypeAlias = RunState | Literal["unknown", ""]  # unknown: a run without run.json; "": a collection
STATES: tuple[State, ...] = ("running", "ended", "interrupted", "failed", "died", "unknown")
DATA_KEYS = ("name", "dataset_name", "data_path")  # the first that is there names a dataset
MAX_STEPS = 10**12  # greater numbers are damage
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast if libyaml is there


@dataclass(frozen=True, slots=True)
class RunSummary:
    name: str
    state: State
    cause: str  # why it failed; else empty
    tags: tuple[str, ...]
    notes: str
    starts: tuple[RunStart, ...]
    started_at: float | None  # seconds since 1970, of the first start
    duration_s: float | None  # all starts together
    model: str
    data: str
    num_steps: int | None  # steps of the configuration

    @property
    def text(self) -> str:
        """Return the text that a search reads, in lower case."""
        return " ".join((self.name, self.cause, *self.tags, self.notes, self.model, self.data)).lower()


def summarize(source: ViewerSource) -> RunSummary:
    """Return the summary of a run or collection, as its files are now."""
    record, config = source.record, parse_config(source.config_text)
    starts = () if record is None else record.starts
    last = starts[-1] if starts else None
    written = last_written(source.path)
    state: State = "" if source.kind == "collection" else "running" if is_held(source.path) else "unknown"
    return RunSummary(
        name=source.id if record is None else record.name,
        state=state if last is None else last.state,
        cause="" if last is None else last.cause,
        tags=() if record is None else record.tags,
        notes="" if record is None else record.notes,
        starts=starts,
        started_at=starts[0].started_at if starts else _made_at(source.path),
        duration_s=_duration_s(starts, written) if starts else None,
        model=_model(config),
        data=_data(config),
        num_steps=_num_steps(config),
    )


@functools.lru_cache(maxsize=1024)
def parse_config(text: str) -> Mapping[str, Any]:
    """Return a configuration; empty if the text is no mapping or cannot be read."""
    try:
        values = yaml.load(text, _LOADER)  # a safe loader
    except Exception:  # yaml's own errors, and those of Python's types for an impossible date or number  # noqa: BLE001
        return {}
    return values if isinstance(values, dict) else {}


def _duration_s(starts: Sequence[RunStart], written: float) -> float:
    """Return how long all starts lasted together; one that died, until it last wrote or the next one began."""
    next_starts = [*(start.started_at for start in starts[1:]), math.inf]
    return sum(_seconds(start, written, latest) for start, latest in zip(starts, next_starts, strict=True))


def _seconds(start: RunStart, written: float, latest: float) -> float:
    end = start.ended_at
    if end is None:
        end = time.time() if start.state == "running" else written
    return max(0.0, min(end, latest) - start.started_at)


def _made_at(path: Path) -> float | None:
    try:
        return (path / "config.yaml").stat().st_mtime
    except OSError:
        return None


def _get(values: object, *names: str) -> object:
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _model(config: Mapping[str, Any]) -> str:
    found = _get(config, "policy", "model_name") or _get(config, "model", "name") or _get(config, "model")
    return found if isinstance(found, str) else ""


def _data(config: Mapping[str, Any]) -> str:
    train = _get(config, "data", "train") or _get(config, "data")
    named = [
        next((text for key in DATA_KEYS if isinstance(text := each.get(key), str) and text), "")
        for each in (train if isinstance(train, list) else [train])
        if isinstance(each, dict)
    ]
    return train if isinstance(train, str) else ", ".join(dict.fromkeys(filter(None, named)))


def _num_steps(config: Mapping[str, Any]) -> int | None:
    found = (_get(section, "max_num_steps") for section in config.values())
    return next((value for value in found if type(value) is int and 0 <= value < MAX_STEPS), None)
