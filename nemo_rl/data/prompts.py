"""Sequences of prompts that need not be in memory, and the ids of prompts.

`Blend` concatenates lazily made prompts with others and gives ids. A lazy prompt is made from its row each time it is
needed. Ids, agents and environments of all prompts are known without reading rows again.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, overload

import numpy as np

from nemo_rl.data.rows import Rows, SelectedRows, describe_row_error
from nemo_rl.errors import DataError, UnusableRowError
from nemo_rl.types import Prompt

SAMPLE_ROWS = 1_000  # rows of each part that are checked before a model loads


@dataclass(frozen=True, slots=True)
class Blend(Sequence[Prompt]):
    """The concatenated prompts of several parts, with ids.

    An id is a digest of the prompt's content, numbered if it repeats, so a prompt keeps its id when others are
    added, removed or moved. A slice is a blend too.
    """

    parts: tuple["LazyPrompts | InMemoryPrompts", ...]
    positions: Sequence[int] = field(repr=False)  # indices of its prompts in the concatenated parts
    repeats: "array[int]" = field(repr=False)  # per prompt, how many earlier ones have the same digest

    @classmethod
    def of(cls, parts: "Sequence[LazyPrompts | InMemoryPrompts]", *, without: Collection[int] = ()) -> "Blend":
        """Return the blend of all prompts of the parts except those at the positions `without`."""
        every = range(sum(len(part) for part in parts))
        positions = array("I", (position for position in every if position not in without)) if without else every
        digests = [np.asarray(part.digests, dtype=np.uint64) for part in parts]
        whole = digests[0] if len(parts) == 1 else np.concatenate(digests)
        kept = whole[np.asarray(positions)] if without else whole
        return cls(tuple(parts), positions, _count_earlier_duplicates(kept))

    @property
    def task_names(self) -> frozenset[str]:
        """Return the environments that the prompts need."""
        return frozenset[str]().union(*(part.task_names for part in self.parts))

    @property
    def agent_names(self) -> frozenset[str]:
        """Return the NeMo Gym agents that the prompts need."""
        return frozenset[str]().union(*(part.agent_names for part in self.parts))

    def without(self, indices: Container[int]) -> "Blend":
        """Return the blend of the prompts at all other indices; they keep their ids."""
        kept = [index for index in range(len(self)) if index not in indices]
        positions, repeats = (
            array("I", [values[index] for index in kept]) for values in (self.positions, self.repeats)
        )
        return Blend(self.parts, positions, repeats)

    def prompt_ids(self) -> Iterator[str]:
        """Yield the ids of all prompts in order, without reading a row."""
        starts = self._part_offsets()
        for position, repeat in zip(self.positions, self.repeats, strict=True):
            number = bisect_right(starts, position) - 1
            yield _prompt_id(self.parts[number].digests[position - starts[number]], repeat)

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "Blend": ...
    def __getitem__(self, index: int | slice) -> "Prompt | Blend":
        if isinstance(index, slice):
            return Blend(self.parts, self.positions[index], self.repeats[index])
        position, starts = self.positions[index], self._part_offsets()
        number = bisect_right(starts, position) - 1
        part, row = self.parts[number], position - starts[number]
        return replace(part.at(row), prompt_id=_prompt_id(part.digests[row], self.repeats[index]))

    def __iter__(self) -> Iterator[Prompt]:
        """Yield the prompts, holding one at a time; a file is opened once for a run of consecutive rows."""
        starts, index = self._part_offsets(), 0
        for number, run in groupby(self.positions, key=lambda position: bisect_right(starts, position) - 1):
            part, rows = self.parts[number], array("I", (position - starts[number] for position in run))
            for row, prompt in zip(rows, part.read(rows), strict=True):
                yield replace(prompt, prompt_id=_prompt_id(part.digests[row], self.repeats[index]))
                index += 1

    def spread(self, *, all_in_memory: bool = False) -> list[int]:
        """Return the indices of at most SAMPLE_ROWS prompts of each part, evenly spread over it.

        With `all_in_memory` they are all indices of parts in memory.
        """
        bounds = [bisect_left(self.positions, start) for start in (*self._part_offsets(), sys.maxsize)]
        chosen: list[int] = []
        for part, (low, high) in zip(self.parts, pairwise(bounds), strict=True):
            is_whole = all_in_memory and isinstance(part, InMemoryPrompts)
            chosen += (low + index for index in spread(high - low, high - low if is_whole else SAMPLE_ROWS))
        return chosen

    def _part_offsets(self) -> list[int]:
        return list(accumulate((len(part) for part in self.parts[:-1]), initial=0))


class LazyPrompts:
    """One prompt per row, without ids, made when it is needed.

    Every row is read once at construction, so that an unusable one is found at the start: DataError names file:line.
    With `is_sampled` only some are, and environments and agents are those of the sample.
    """

    def __init__(
        self,
        rows: Rows,
        make_prompt: Callable[[dict[str, Any]], Prompt],
        *,
        digest: Callable[[Prompt], int] | None = None,
        is_sampled: bool = False,
    ) -> None:
        """`digest` returns the digest that a prompt's id is made from; None: that of its row's text."""
        self.digests = rows.digests if digest is None else array("Q")
        self.is_sampled = is_sampled
        self._rows = rows
        self._make_prompt = make_prompt
        tasks, agents = set(), set()
        for prompt in self.read(spread(len(rows), SAMPLE_ROWS) if is_sampled else range(len(rows))):
            tasks.add(prompt.task_name)
            agents.add(prompt.agent_name)
            if digest is not None:
                self.digests.append(digest(prompt))
        self.task_names = frozenset(tasks)
        self.agent_names = frozenset(agents - {""})

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, index: int) -> Prompt:
        return self._build_prompt(index, self._rows.row(index))

    def read(self, indices: Sequence[int]) -> Iterator[Prompt]:
        """Yield the prompts at `indices`; the file is opened once."""
        return (prompt for prompt, _ in self.read_rows(indices))

    def read_rows(self, indices: Sequence[int]) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """Yield the prompts at `indices`, each with its row."""
        for index, row in zip(indices, self._rows.rows(indices), strict=True):
            yield self._build_prompt(index, row), row

    def select(self, indices: Sequence[int]) -> "LazyPrompts":
        """Return the prompts at `indices` alone."""
        return LazyPrompts(SelectedRows(self._rows, indices), self._make_prompt, is_sampled=self.is_sampled)

    def _build_prompt(self, index: int, row: dict[str, Any]) -> Prompt:
        try:
            return self._make_prompt(row)
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise UnusableRowError(f"{self._rows.location(index)}: {describe_row_error(error)}") from error


class InMemoryPrompts:
    """Prompts in memory, with the interface of lazy ones."""

    is_sampled = False

    def __init__(self, prompts: Sequence[Prompt], digests: Sequence[int]) -> None:
        self.digests = array("Q", digests)
        self.task_names = frozenset(prompt.task_name for prompt in prompts)
        self.agent_names = frozenset(prompt.agent_name for prompt in prompts if prompt.agent_name)
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, index: int) -> Prompt:
        return self.prompts[index]

    def read(self, indices: Sequence[int]) -> Iterator[Prompt]:
        return (self.prompts[index] for index in indices)

    def select(self, indices: Sequence[int]) -> "InMemoryPrompts":
        """Return the prompts at `indices` alone."""
        return InMemoryPrompts(list(self.read(indices)), [self.digests[index] for index in indices])


def spread(count: int, maximum: int) -> range:
    """Return at most `maximum` indices below `count`, evenly spread: 10 and 3 give 0, 4, 8."""
    return range(0, count, -(-count // maximum) if count else 1)


def _prompt_id(digest: int, repeat: int) -> str:
    return f"{digest:016x}-{repeat}" if repeat else f"{digest:016x}"


def _count_earlier_duplicates(digests: np.ndarray) -> "array[int]":
    """Return the number of equal digests before each: [7, 5, 7, 7] gives [0, 0, 1, 2]."""
    repeats, first_bytes = np.zeros(len(digests), dtype=np.uint32), digests.view(np.uint8)[::8]
    for byte in range(256):  # a part at a time, so that sorting takes little memory
        indices = np.flatnonzero(first_bytes == byte)
        order = indices[np.argsort(digests[indices], kind="stable")]
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = digests[order[1:]] != digests[order[:-1]]
        ranks = np.arange(len(order), dtype=np.uint32)
        repeats[order] = ranks - np.maximum.accumulate(np.where(is_first, ranks, 0))
    is_small = repeats.max(initial=0) < 256
    return array("B" if is_small else "I", repeats.astype(np.uint8 if is_small else np.uint32).tobytes())
