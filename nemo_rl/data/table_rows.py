"""Rows of tables of the datasets library, which stay in their files: in order, or by index."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nemo_rl.data.rows import Row, digest_text

Convert: TypeAlias = Callable[[Row], Row | None]  # None: the row is skipped

BATCH_ROWS = 1_000  # converted to Python values at once
BATCH_PICTURES = 16  # the same of rows with images, which are read as Arrow's tables


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one or several `datasets.Dataset`, converted as they are read."""

    source: str  # names the rows in errors
    parts: Sequence[Any]  # datasets.Dataset
    convert: Convert | None = None

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order."""
        return (row for _, row in self.numbered_rows())

    def numbered_rows(self, fields: Sequence[str] = ()) -> Iterator[tuple[int, Row]]:
        """Yield each row with its number among the stored ones; only `fields` of them, unless there are none."""
        number = 0
        for part in self.parts:
            chosen = part.select_columns(list(fields)) if fields else part
            for batch in chosen.iter(BATCH_ROWS if chosen.format["type"] is None else BATCH_PICTURES):
                batch = batch if isinstance(batch, dict) else batch.to_pydict()
                names = list(batch)
                for values in zip(*batch.values(), strict=True):
                    row = self._convert(dict(zip(names, values, strict=True)))
                    if row is not None:
                        yield number, row
                    number += 1

    def stored_row(self, number: int) -> dict[str, Any]:
        """Return one row by its number; it must not be one that `convert` skips."""
        for part in self.parts:
            if number < len(part):
                stored = part[number]
                stored = stored if isinstance(stored, dict) else stored.to_pylist()[0]
                row = self._convert(stored)
                assert row is not None
                return dict(row)
            number -= len(part)
        raise IndexError(number)

    def _convert(self, row: Row) -> Row | None:
        return row if self.convert is None else self.convert(row)


class TableRows:
    """Rows of a table by index, with the interface of those of a file; 8 to 12 bytes of memory per row."""

    def __init__(self, table: Table, *, limit: int | None = None, fields: Sequence[str] = ()) -> None:
        """Index the rows, at most the first `limit`; their digests are those of `fields`, or of whole rows."""
        self.digests = array("Q")
        self._table = table
        numbers = array("I")  # among the stored rows
        for number, row in table.numbered_rows(fields):
            if len(self.digests) == limit:
                break
            if table.convert is not None:  # others skip no row
                numbers.append(number)
            self.digests.append(digest_text(repr(tuple(row.values())).encode(errors="surrogatepass")))
        self._numbers: Sequence[int] = numbers if table.convert is not None else range(len(self.digests))

    def __len__(self) -> int:
        return len(self._numbers)

    def row(self, index: int) -> dict[str, Any]:
        return self._table.stored_row(self._numbers[index])

    def rows(self, indices: Sequence[int] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows at `indices`, or all rows in order."""
        return (self.row(index) for index in (range(len(self)) if indices is None else indices))

    def location(self, index: int) -> str:
        return f"{self._table.source}: row {self._numbers[index]}"
