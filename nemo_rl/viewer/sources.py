"""The run directories and collections that a viewer shows, read as they grow: metrics, configuration, rollouts."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from nemo_rl.errors import ConfigError, DataError
from nemo_rl.viewer.index import Query, RolloutIndex, Rows

MAX_DEPTH = 3  # directories below a given one that are searched for runs
MAX_SOURCES = 500
MAX_METRIC_BYTES = 256 << 20

Key: TypeAlias = tuple[int, int]  # file of a set of rollouts, row in it


class MetricsFile:
    """metrics.jsonl, read as it grows: the value of each metric that was logged last for a step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_name: dict[str, dict[int, float]] = {}
        self.num_damaged = 0
        self._end = 0

    def advance(self) -> bool:
        """Read new lines; return whether there were any. A file that is not there has none."""
        try:
            size = self.path.stat().st_size
            if size < self._end:
                self.by_name, self._end, self.num_damaged = {}, 0, 0
            if size == self._end or size > MAX_METRIC_BYTES:
                return False
            with self.path.open("rb") as file:
                file.seek(self._end)
                data = file.read()
        except OSError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self._add(line)
        self._end += len(whole)
        return bool(whole)

    def series(self, name: str) -> dict[int, float]:
        """Return a metric by step, in order; empty where it was not logged."""
        return dict(sorted(self.by_name.get(name, {}).items()))

    def at(self, step: int) -> dict[str, float]:
        """Return all metrics of a step."""
        return {name: values[step] for name, values in sorted(self.by_name.items()) if step in values}

    @property
    def steps(self) -> list[int]:
        """Return the training steps that have been logged."""
        trained = self.by_name.get("timing/train/total_step_time") or self.by_name.get("train/reward") or {}
        return sorted(trained or self.by_name.get("train/loss", {}))

    def _add(self, line: bytes) -> None:
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
            for name, value in values.items():
                self.by_name.setdefault(str(name), {})[step] = float(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            self.num_damaged += 1


class RolloutSet:
    """Rollouts of one or several files: those of training, of a validation, or the shards of a collection."""

    def __init__(self, paths: Sequence[Path], cache: Path | None) -> None:
        self._cache = cache
        self.indexes: list[RolloutIndex] = []
        self.problem = ""  # why the files could not be read the last time
        self.add(paths)

    def __len__(self) -> int:
        return sum(map(len, self.indexes))

    def add(self, paths: Iterable[Path]) -> None:
        """Add files that are not known yet."""
        known = {index.path for index in self.indexes}
        self.indexes += [RolloutIndex(path, cache=self._cache) for path in paths if path not in known]

    def advance(self, *, budget_s: float) -> tuple[bool, bool]:
        """Index new lines; return whether something changed, and whether more can be indexed at once."""
        before, has_more, self.problem = len(self), False, ""
        notes = self.notes
        for index in self.indexes:
            try:
                has_more |= index.path.exists() and index.advance(budget_s=budget_s / max(1, len(self.indexes)))
                if len(index) and not index.path.exists():
                    self.problem = f"{index.path.name} has disappeared; what was indexed of it cannot be shown"
            except DataError as error:
                self.problem = str(error)
        return len(self) != before or self.notes != notes, has_more

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of the files."""
        notes = [note for index in self.indexes for note in index.notes]
        damaged = sum(index.num_damaged for index in self.indexes)
        notes += [f"{damaged} damaged lines are skipped"] if damaged else []
        return notes + ([self.problem] if self.problem else [])

    @property
    def progress(self) -> float:
        """Return the share of the bytes that is indexed."""
        size = sum(index.size for index in self.indexes)
        return 1.0 if not size else sum(index.end for index in self.indexes) / size

    def names(self, column: str) -> list[str]:
        """Return the names that a column has in any file."""
        return sorted({name for index in self.indexes for name in index.names(column)})

    def select(self, query: Query) -> list[tuple[int, Rows]]:
        """Return the rows of each file that pass, each in the requested order."""
        return [(number, index.select(query)) for number, index in enumerate(self.indexes)]

    def keys(self, query: Query, *, limit: int, offset: int = 0) -> tuple[list[Key], int]:
        """Return a page of the rows of all files in their common order, and how many there are."""
        selected = self.select(query)
        total = sum(len(rows) for _, rows in selected)
        if len(selected) == 1 or not query.sort:
            pairs = [
                (number, row) for number, rows in selected for row in _window(rows, selected, number, offset, limit)
            ]
            return pairs, total
        name = query.sort.lstrip("-")
        heads = [(n, rows[: offset + limit]) for n, rows in selected]
        merged = [(self._rank(n, row, name, query.sort), n, row) for n, rows in heads for row in rows.tolist()]
        return [(n, row) for _, n, row in sorted(merged)[offset : offset + limit]], total

    def search(self, query: Query, *, limit: int, offset: int = 0) -> tuple[list[Key], int | None]:
        """Return rows that also say `query.text`, and the offset to search on from; None: everything was searched."""
        found: list[Key] = []
        done = 0
        for number, rows in self.select(query):
            rest = rows[max(0, offset - done) :]
            hits = self.indexes[number].search(rest, query.text, limit=limit - len(found))
            found += [(number, row) for row in hits.rows.tolist()]
            if hits.resume_at is not None:
                return found, max(offset, done) + hits.resume_at
            done += len(rows)
        return found, None

    def read(self, key: Key) -> dict[str, Any]:
        """Return one rollout. Raises DataError where it is not there (any more)."""
        file, row = key
        if not (0 <= file < len(self.indexes) and 0 <= row < len(self.indexes[file])):
            raise DataError(f"there is no rollout {file}.{row} (any more)")
        return self.indexes[file].read(row)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column over all files."""
        return np.concatenate([np.asarray(index.columns[name]) for index in self.indexes] or [np.empty(0)])

    def _rank(self, file: int, row: int, name: str, sort: str) -> float:
        value = float(self.indexes[file].columns[name][row])
        return math.inf if math.isnan(value) else -value if sort.startswith("-") else value


def _window(rows: Rows, selected: list[tuple[int, Rows]], number: int, offset: int, limit: int) -> list[int]:
    """Return the part of one file's rows that falls into a page over all files one after the other."""
    before = sum(len(other) for n, other in selected if n < number)
    return rows[max(0, offset - before) : max(0, offset + limit - before)].tolist()


class Source:
    """One run directory or collection, by an id that is part of addresses."""

    def __init__(self, source_id: str, path: Path, kind: Literal["run", "collection"], cache: Path | None) -> None:
        self.id, self.path, self.kind = source_id, path, kind
        self.version = 0  # grows with every change
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self._config = ""
        if kind == "run":
            self.splits = {
                name: RolloutSet([path / "rollouts" / f"{name}.jsonl"], cache) for name in ("train", "validation")
            }
            self.details = RolloutSet([path / "rollouts" / "details.jsonl"], cache)
        else:
            self.splits = {"rollouts": RolloutSet(_shard_files(path), cache)}
            self.details = RolloutSet([], cache)

    def split(self, name: str) -> RolloutSet:
        """Return the rollouts of a name: train, validation, or rollouts. Raises DataError for another."""
        if name not in self.splits:
            raise DataError(f"{self.id} has no rollouts named {name!r}; known: {', '.join(self.splits)}")
        return self.splits[name]

    def advance(self, *, budget_s: float = 0.05) -> bool:
        """Read what is new; return whether more can be read at once."""
        if self.kind == "collection":
            self.splits["rollouts"].add(_shard_files(self.path))
        changed, has_more = self.metrics.advance(), False
        for rollouts in (*self.splits.values(), self.details):
            grew, more = rollouts.advance(budget_s=budget_s)
            changed, has_more = changed or grew, has_more or more
        self.version += changed
        return has_more

    def complete(self) -> "Source":
        """Read everything that is there, and return the source."""
        while self.advance(budget_s=5.0):
            pass
        return self

    @property
    def config_text(self) -> str:
        """Return the configuration as the run wrote it; empty where there is none."""
        if not self._config:
            for path in (self.path / "config.yaml", *sorted(self.path.glob("*_identity.json"))[:1]):
                if path.is_file():
                    self._config = path.read_text(encoding="utf-8", errors="replace")
                    break
        return self._config

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of the files."""
        notes = [] if self.path.is_dir() else [f"{self.path} has disappeared; what was read before is shown"]
        if self.metrics.num_damaged:
            notes.append(f"{self.metrics.num_damaged} damaged lines of metrics.jsonl are skipped")
        for name, rollouts in self.splits.items():
            notes += [f"{name}: {note}" for note in rollouts.notes]
            if rollouts.progress < 0.999 and any(index.pending_bytes > 1 << 20 for index in rollouts.indexes):
                notes.append(f"{name}: {rollouts.progress:.0%} is indexed so far")
        return notes

    def failures(self, split: str, *, limit: int = 2000) -> list[tuple[str, str, int, Key]]:
        """Return class, cause, count and first rollout of the failed rollouts, the most frequent first."""
        rollouts = self.split(split)
        counts: Counter[tuple[str, str]] = Counter()
        first: dict[tuple[str, str], Key] = {}
        for key in rollouts.keys(Query(failure="any"), limit=limit)[0]:
            row = try_read(rollouts, key)
            failure = (row or {}).get("failure") or {}
            name = (str(failure.get("class", "")), str(failure.get("cause", "")))
            counts[name] += 1
            first.setdefault(name, key)
        return [(kind, cause, count, first[kind, cause]) for (kind, cause), count in counts.most_common()]

    def failed_attempts(self, *, limit: int = 2000) -> list[dict[str, Any]]:
        """Return the first failed attempts of a collection, which have files of their own."""
        return [row for path in sorted(self.path.glob("*_failures.jsonl")) for row in _read_some(path, limit)][:limit]

    def find_details(self, row: dict[str, Any], chain: int = 0) -> dict[str, Any] | None:
        """Return the token details of a rollout of training; None where they were not recorded."""
        if not isinstance(row.get("step"), int):
            return None
        query, generation = Query(group=str(row.get("group_id", "")), step=row["step"]), row.get("generation_index")
        for file, number in self.details.keys(query, limit=10_000)[0]:
            if self.details.indexes[file].columns["generation"][number] != generation:
                continue  # not read: the lines are long
            found = try_read(self.details, (file, number))
            if found and (found.get("generation_index"), found.get("chain")) == (generation, chain):
                return found
        return None


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources below the given paths; ids are their directories' names, made unique."""

    paths: tuple[Path, ...]
    cache: Path | None
    by_id: dict[str, Source]

    @classmethod
    def open(cls, paths: Sequence[Path], *, cache: Path | None = None) -> "Sources":
        """Find the runs and collections. Raises ConfigError for a path that is none and has none below it."""
        sources = cls(tuple(paths), cache, {})
        for path in paths:
            if not path.is_dir():
                raise ConfigError("PATH", str(path), "is not a directory of runs, a run or a collection")
        sources.refresh()
        if not sources.by_id:
            raise ConfigError(
                "PATH",
                ", ".join(map(str, paths)),
                "holds no run (config.yaml, metrics.jsonl) and no collection (rollouts-rs*.jsonl)",
            )
        return sources

    def refresh(self) -> None:
        """Add runs that have appeared since."""
        known = {source.path for source in self.by_id.values()}
        for path, kind in _find(self.paths):
            if path in known or len(self.by_id) >= MAX_SOURCES:
                continue
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.name) or "run"
            unique = next(n for k in range(1, 10_000) if (n := name if k == 1 else f"{name}~{k}") not in self.by_id)
            self.by_id[unique] = Source(unique, path, kind, self.cache)
            known.add(path)

    def get(self, source_id: str) -> Source:
        """Return a source; DataError for an unknown id."""
        if source_id not in self.by_id:
            raise DataError(f"there is no run or collection {source_id!r}")
        return self.by_id[source_id]

    def in_order(self) -> list[Source]:
        """Return all sources, the one that was written last first."""
        return sorted(self.by_id.values(), key=lambda source: -_modified(source.path))


def try_read(rollouts: RolloutSet, key: Key) -> dict[str, Any] | None:
    """Return one rollout, or None where it cannot be read."""
    try:
        return rollouts.read(key)
    except DataError:
        return None


def find_kind(path: Path) -> Literal["run", "collection"] | None:
    """Return what a directory is."""
    try:
        if (path / "metrics.jsonl").exists() or (path / "rollouts" / "train.jsonl").exists():
            return "run"
        return "collection" if next(path.glob("rollouts*.jsonl"), None) is not None else None
    except OSError:
        return None


def _find(paths: Sequence[Path]) -> Iterator[tuple[Path, Literal["run", "collection"]]]:
    pending = [(path.resolve(), 0) for path in reversed(paths)]
    while pending:
        path, depth = pending.pop()
        kind = find_kind(path)
        if kind is not None:
            yield path, kind
        elif depth < MAX_DEPTH:
            try:
                below = sorted(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
            except OSError:
                continue
            pending += [(Path(each), depth + 1) for each in reversed(below)]


def _shard_files(path: Path) -> list[Path]:
    shards = sorted(p for p in path.glob("rollouts-rs*.jsonl") if not p.stem.endswith("_failures"))
    return shards or [p for p in [path / "rollouts.jsonl"] if p.exists()]


def _read_some(path: Path, limit: int) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for _, line in zip(range(limit), file, strict=False):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def _modified(path: Path) -> float:
    try:
        return max(p.stat().st_mtime for p in (path, path / "metrics.jsonl", path / "rollouts") if p.exists())
    except (OSError, ValueError):
        return 0.0
