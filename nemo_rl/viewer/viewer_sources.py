"""The run directories and collections that a viewer shows: found on the disk, and read as they grow."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from nemo_rl.config.images import ImageLimits
from nemo_rl.data.images import decode, to_data_url
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.observability.run_record import RECORD_FILE, RunRecord, read_run_record
from nemo_rl.types import ImagePart
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.index_records import parse_object
from nemo_rl.viewer.metrics_file import MetricsFile
from nemo_rl.viewer.rollout_set import Key, RolloutSet, try_read

MAX_DEPTH = 3  # directories below a given one that are searched for runs
MAX_SOURCES = 500
PICTURES = ImageLimits(max_bytes=2**18, max_pixels=2**19)  # bounds of a thumbnail; a run writes smaller ones
DIGEST = re.compile(r"[0-9a-f]{64}")

ResultT = TypeVar("ResultT")
SourceKind: TypeAlias = Literal["run", "collection"]


class ViewerSource:
    """One run directory or collection, by an id that is part of addresses."""

    def __init__(self, source_id: str, path: Path, kind: SourceKind, cache: Path | None) -> None:
        self.id, self.path, self.kind = source_id, path, kind
        self.version = 0  # grows with every change
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self._config, self._config_stamp = "", (Path(), 0)
        self.record: RunRecord | None = None  # None: the run has none
        self._record_stamp = 0
        self._remembered: dict[str, tuple[int, Any]] = {}
        if kind == "run":
            self.splits = {
                name: RolloutSet([path / "rollouts" / f"{name}.jsonl"], cache) for name in ("train", "validation")
            }
            self.details = RolloutSet([path / "rollouts" / "details.jsonl"], cache)
        else:
            self.splits = {"rollouts": RolloutSet(_shard_files(path), cache)}
            self.details = RolloutSet([], cache)
        self.failed = RolloutSet(_failure_files(path), cache)  # failed attempts of a collection

    @classmethod
    def open(cls, path: Path) -> "ViewerSource":
        """Open one run or collection and read all of it. Raises ConfigError for another directory."""
        kind = find_kind(path)
        if kind is None:
            problem = "is no run (metrics.jsonl, rollouts/train.jsonl) and no collection (rollouts-rs*.jsonl)"
            raise ConfigError("RUN", str(path), problem)
        return cls(path.resolve().name, path.resolve(), kind, None).complete()

    def picture(self, digest: str) -> str | None:
        """Return the thumbnail of an image as a data URL; None if the run has none of it."""
        if not DIGEST.fullmatch(digest):
            return None
        try:
            with (self.path / "rollouts" / "images" / f"{digest}.webp").open("rb") as file:
                data = file.read(PICTURES.max_bytes + 1)
            decode(data, digest, PICTURES)
        except (OSError, DataError):
            return None
        return to_data_url(ImagePart(digest, data))

    def split(self, name: str) -> RolloutSet:
        """Return the rollouts of a name: train, validation, or rollouts. Raises DataError for another."""
        if name not in self.splits:
            raise DataError(f"{self.id} has no rollouts named {name!r}; known: {', '.join(self.splits)}")
        return self.splits[name]

    def advance(self, *, budget_s: float = 0.05) -> bool:
        """Read new lines; return whether more can be read at once."""
        if self.kind == "collection":
            self.splits["rollouts"].add(_shard_files(self.path))
            self.failed.add(_failure_files(self.path))
        changed, has_more = self.metrics.advance() | self._follow_record(), False
        for rollouts in (*self.splits.values(), self.details, self.failed):
            grew, more = rollouts.advance(budget_s=budget_s)
            changed, has_more = changed or grew, has_more or more
        self.version += changed
        return has_more

    def _follow_record(self) -> bool:
        """Read run.json if it was written, or if its process may have died; return whether it says something else."""
        try:
            stamp = (self.path / RECORD_FILE).stat().st_mtime_ns
        except OSError:
            return False
        last = None if self.record is None else self.record.last
        if stamp == self._record_stamp and (last is None or last.state != "running"):
            return False
        before, self.record, self._record_stamp = self.record, read_run_record(self.path), stamp
        return self.record != before

    def remember(self, name: str, compute: Callable[[], ResultT]) -> ResultT:
        """Return the result of `compute`, computed once for each version of the source."""
        version, value = self._remembered.get(name, (-1, None))
        if version != self.version:
            value = compute()
            self._remembered[name] = (self.version, value)
        return value

    def complete(self) -> "ViewerSource":
        """Read everything that is there, and return the source."""
        while self.advance(budget_s=5.0):
            pass
        return self

    @property
    def config_text(self) -> str:
        """Return the configuration as the run's last start wrote it; empty if it is missing."""
        own = self.path / "config.yaml"
        path = own if own.is_file() else min(self.path.glob("*_identity.json"), default=own)
        with contextlib.suppress(OSError):
            stamp = (path, path.stat().st_mtime_ns)
            if stamp != self._config_stamp:
                self._config, self._config_stamp = path.read_text(encoding="utf-8", errors="replace"), stamp
        return self._config

    @property
    def notes(self) -> list[str]:
        """Return the problems of the files, for the user."""
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
        return [row for path in _failure_files(self.path) for row in _read_some(path, limit)][:limit]

    def find_details(self, row: dict[str, Any], chain: int = 0) -> dict[str, Any] | None:
        """Return the token details of a rollout of training; None if they were not recorded."""
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
class ViewerSources:
    """All sources below the given paths; ids are their directories' names, made unique."""

    paths: tuple[Path, ...]
    cache: Path | None
    by_id: dict[str, ViewerSource]

    @classmethod
    def open(cls, paths: Sequence[Path], *, cache: Path | None = None) -> "ViewerSources":
        """Find the runs and collections. Raises ConfigError for a path that contains no run or collection."""
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
            self.by_id[unique] = ViewerSource(unique, path, kind, self.cache)
            known.add(path)

    def get(self, source_id: str) -> ViewerSource:
        """Return a source; DataError for an unknown id."""
        if source_id not in self.by_id:
            raise DataError(f"there is no run or collection {source_id!r}")
        return self.by_id[source_id]

    def in_order(self) -> list[ViewerSource]:
        """Return all sources, the one that was written last first."""
        return sorted(self.by_id.values(), key=lambda source: -last_written(source.path))


def find_kind(path: Path) -> SourceKind | None:
    """Return whether a directory is a run or a collection; None if neither."""
    try:
        if (path / "metrics.jsonl").exists() or (path / "rollouts" / "train.jsonl").exists():
            return "run"
        return "collection" if next(path.glob("rollouts*.jsonl"), None) is not None else None
    except OSError:
        return None


def _find(paths: Sequence[Path]) -> Iterator[tuple[Path, SourceKind]]:
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


def _failure_files(path: Path) -> list[Path]:
    return sorted(path.glob("*_failures.jsonl"))


def _read_some(path: Path, limit: int) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for _, line in zip(range(limit), file, strict=False):
                with contextlib.suppress(ValueError):
                    yield parse_object(line)
    except OSError:
        return


def last_written(path: Path) -> float:
    """Return when a run or collection was written last, in seconds since 1970; 0 if it has disappeared."""
    try:
        return max(p.stat().st_mtime for p in (path, path / "metrics.jsonl", path / "rollouts") if p.exists())
    except (OSError, ValueError):
        return 0.0
