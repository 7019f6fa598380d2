"""Rollouts of one or several files as one sequence of rows: filtered, sorted, searched and read by key."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nemo_rl.errors import DataError
from nemo_rl.viewer.index import Query, RolloutIndex, Rows

MAX_NAMED = 10  # damaged rows that a note names

Key: TypeAlias = tuple[int, int]  # file of a set of rollouts, row in it


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
        """Return the problems of the files, for the user."""
        notes = [note for index in self.indexes for note in index.notes]
        if self.num_damaged:
            damages = [f"{where} ({reason})" for where, reason in self.damages[:MAX_NAMED]]
            more = f", and {self.num_damaged - len(damages)} more" if self.num_damaged > len(damages) else ""
            notes.append(f"damaged rows: {self.num_damaged}, {'; '.join(damages)}{more}")
        return notes + ([self.problem] if self.problem else [])

    @property
    def num_damaged(self) -> int:
        """Return the number of rows that cannot be shown, as far as they were read."""
        return sum(index.num_damaged for index in self.indexes)

    @property
    def damages(self) -> list[tuple[str, str]]:
        """Return file:line of damaged rows, and why they are."""
        return [damage for index in self.indexes for damage in index.damages.items()]

    @property
    def progress(self) -> float:
        """Return the share of the bytes that is indexed."""
        size = sum(index.size for index in self.indexes)
        return 1.0 if not size else sum(index.end for index in self.indexes) / size

    def names(self, column: str) -> list[str]:
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
        """Return rows that also contain `query.text`, and the offset at which to resume; None: all were searched."""
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
        """Return one rollout. Raises DataError if it does not exist (any more)."""
        file, row = key
        if not (0 <= file < len(self.indexes) and 0 <= row < len(self.indexes[file])):
            raise DataError(f"there is no rollout {file}.{row} (any more)")
        return self.indexes[file].read(row)

    def value(self, column: str, key: Key) -> float:
        """Return one value of a column of numbers. The row must exist."""
        return float(self.indexes[key[0]].columns[column][key[1]])

    def key_at(self, number: int) -> Key:
        """Return the key of a row that is counted over all files. Raises DataError if it does not exist."""
        for file, index in enumerate(self.indexes):
            if number < len(index):
                return file, number
            number -= len(index)
        raise DataError("there is no such rollout")

    def column(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(index.columns[name]) for index in self.indexes] or [np.empty(0)])

    def _rank(self, file: int, row: int, name: str, sort: str) -> float:
        value = self.value(name, (file, row))
        return math.inf if math.isnan(value) else -value if sort.startswith("-") else value


def _window(rows: Rows, selected: list[tuple[int, Rows]], number: int, offset: int, limit: int) -> list[int]:
    """Return the part of one file's rows that falls into a page over the concatenated files."""
    before = sum(len(other) for n, other in selected if n < number)
    return rows[max(0, offset - before) : max(0, offset + limit - before)].tolist()


def try_read(rollouts: RolloutSet, key: Key) -> dict[str, Any] | None:
    """Return one rollout; None if it cannot be read, which `RolloutSet.notes` tells on the page."""
    try:
        return rollouts.read(key)
    except DataError:
        return None
