"""Prompts: sequences that need not be in memory, their ids, and their training order, resumable to the exact position.

`Blend` concatenates lazily made prompts with others and gives ids. A lazy prompt is made from its row each time it is
needed. What is needed of all prompts at once (ids, agents, environments) is known without reading rows again.
"""

import hashlib
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, overload

import numpy as np

from nemo_rl.data.rows import Rows, describe_row_error
from nemo_rl.errors import DataError
from nemo_rl.types import Prompt


@dataclass(frozen=True, slots=True)
class Blend(Sequence[Prompt]):
    """The concatenated prompts of several parts, with ids.

    An id is a digest of what the prompt is made of, numbered where it repeats, so a prompt keeps its id when others are
    added, removed or moved. A slice is a blend too.
    """

    parts: tuple["LazyPrompts | InMemoryPrompts", ...]
    positions: "array[int]"  # of its prompts in the concatenated parts
    repeats: "array[int]"  # for each prompt: how many earlier ones have the same digest

    @classmethod
    def of(cls, parts: "Sequence[LazyPrompts | InMemoryPrompts]", *, without: Container[int] = ()) -> "Blend":
        """Return the blend of all prompts of the parts except those at the positions `without`."""
        positions = array(
            "I", (position for position in range(sum(len(part) for part in parts)) if position not in without)
        )
        digests = np.concatenate([np.asarray(part.digests, dtype=np.uint64) for part in parts])
        return cls(tuple(parts), positions, _count_earlier_duplicates(digests[np.asarray(positions)]))

    @property
    def task_names(self) -> frozenset[str]:
        """Return the environments that the prompts need."""
        return frozenset[str]().union(*(part.task_names for part in self.parts))

    @property
    def agent_names(self) -> frozenset[str]:
        """Return the NeMo Gym agents that the prompts need."""
        return frozenset[str]().union(*(part.agent_names for part in self.parts))

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

    def _part_offsets(self) -> list[int]:
        """Return the position at which each part begins."""
        return list(accumulate((len(part) for part in self.parts[:-1]), initial=0))


class LazyPrompts:
    """One prompt per row, without ids, made when it is needed.

    Every row is read once at construction, so that an unusable one is found at the start: DataError names file:line.
    """

    def __init__(
        self,
        rows: Rows,
        make_prompt: Callable[[dict[str, Any]], Prompt],
        *,
        digest: Callable[[Prompt], int] | None = None,
    ) -> None:
        """`digest` returns what a prompt's id is made of; None: the digest of its row's text."""
        self.digests = rows.digests if digest is None else array("Q")
        self._rows = rows
        self._make_prompt = make_prompt
        tasks, agents = set(), set()
        for index, row in enumerate(rows.rows()):
            prompt = self._build_prompt(index, row)
            tasks.add(prompt.task_name)
            agents.add(prompt.agent_name)
            if digest is not None:
                self.digests.append(digest(prompt))
        self.task_names = frozenset(tasks)
        self.agent_names = frozenset(agents - {""})

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, index: int) -> Prompt:
        """Return one prompt."""
        return self._build_prompt(index, self._rows.row(index))

    def read(self, indices: Sequence[int]) -> Iterator[Prompt]:
        """Yield the prompts at `indices`; the file is opened once."""
        return (prompt for prompt, _ in self.read_rows(indices))

    def read_rows(self, indices: Sequence[int]) -> Iterator[tuple[Prompt, dict[str, Any]]]:
        """Yield the prompts at `indices`, each with its row."""
        for index, row in zip(indices, self._rows.rows(indices), strict=True):
            yield self._build_prompt(index, row), row

    def _build_prompt(self, index: int, row: dict[str, Any]) -> Prompt:
        try:
            return self._make_prompt(row)
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{self._rows.location(index)}: {describe_row_error(error)}") from error


class InMemoryPrompts:
    """Prompts in memory, with the interface of lazy ones."""

    def __init__(self, prompts: Sequence[Prompt], digests: Sequence[int]) -> None:
        self.digests = array("Q", digests)
        self.task_names = frozenset(prompt.task_name for prompt in prompts)
        self.agent_names = frozenset(prompt.agent_name for prompt in prompts if prompt.agent_name)
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, index: int) -> Prompt:
        """Return one prompt."""
        return self.prompts[index]

    def read(self, indices: Sequence[int]) -> Iterator[Prompt]:
        """Yield the prompts at `indices`."""
        return (self.prompts[index] for index in indices)

    def select(self, indices: Sequence[int]) -> "InMemoryPrompts":
        """Return the prompts at `indices` alone."""
        return InMemoryPrompts(list(self.read(indices)), [self.digests[index] for index in indices])


def _prompt_id(digest: int, repeat: int) -> str:
    return f"{digest:016x}-{repeat}" if repeat else f"{digest:016x}"


def _count_earlier_duplicates(digests: np.ndarray) -> "array[int]":
    """Return the number of equal digests before each: [7, 5, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    ranks = np.arange(len(ordered), dtype=np.uint32)
    repeats = np.empty(len(ordered), dtype=np.uint32)
    repeats[order] = ranks - np.maximum.accumulate(np.where(is_first, ranks, 0))
    return array("I", repeats.tobytes())


@dataclass(frozen=True, slots=True)
class LoadedPrompt:
    """A prompt and the epoch in which it is used; the two seed its samples."""

    prompt: Prompt
    epoch: int
    prompt_index: int  # in the training order, over all epochs

    @property
    def group_id(self) -> str:
        """Return the id of the prompt's group; it contains the index, since datasets may share prompt ids."""
        return f"{self.epoch}:{self.prompt.prompt_id}:{self.prompt_index}"


class PromptLoader:
    """Prompts in training order, each once per epoch, for `max_epochs` epochs.

    The order of an epoch is a function of (seed, epoch) alone, so the state is a count and the indices of re-queued
    prompts. Prompts are read from `prompts` when they are taken, so those of a large file are never all in memory.
    """

    def __init__(self, prompts: Sequence[Prompt], *, shuffle: bool, seed: int, max_epochs: int) -> None:
        if not prompts:
            raise DataError("there are no prompts to train on")
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._max_epochs = max_epochs
        self._next = 0
        self._put_back: tuple[int, ...] = ()  # indices before the next one that are to be taken again
        self._order: tuple[int, Sequence[int]] = (0, self._epoch_order(0))
        self._fingerprint = fingerprint(self._prompts, shuffle=shuffle, seed=seed)  # once, for every state

    @property
    def consumed(self) -> int:
        """Return the number of prompts taken and not put back, over all epochs."""
        return self._next - len(self._put_back)

    @property
    def num_put_back(self) -> int:
        """Return the number of prompts that were put back; `take` returns them first."""
        return len(self._put_back)

    @property
    def epoch(self) -> int:
        """Return the number of complete epochs; `max_epochs` once the data is exhausted."""
        return self.epoch_after(self.consumed)

    @property
    def data_exhausted(self) -> bool:
        """Return whether `take` has nothing left."""
        return not self._put_back and self._next >= self._max_epochs * len(self._prompts)

    def epoch_after(self, num_prompts: int) -> int:
        """Return the number of complete epochs in `num_prompts` prompts."""
        return num_prompts // len(self._prompts)

    def take(self, count: int) -> tuple[LoadedPrompt, ...]:
        """Return the next `count` prompts, across epochs; fewer at the end of the last epoch, none after it.

        Prompts that were put back come first.
        """
        again, self._put_back = self._put_back[:count], self._put_back[count:]
        end = min(self._next + count - len(again), self._max_epochs * len(self._prompts))
        taken = tuple(self.at(prompt_index) for prompt_index in (*again, *range(self._next, end)))
        self._next = max(self._next, end)
        return taken

    def put_back(self, prompt_indices: Iterable[int]) -> None:
        """Re-queue prompts, in training order, before all others."""
        self._put_back = tuple(sorted({*self._put_back, *prompt_indices}))

    def at(self, prompt_index: int) -> LoadedPrompt:
        """Return the prompt at an index of the training order, whether or not it was taken."""
        epoch, offset = divmod(prompt_index, len(self._prompts))
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return LoadedPrompt(self._prompts[self._order[1][offset]], epoch, prompt_index)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        return {"consumed": self._next, "put_back": list(self._put_back), "data": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`; raises DataError when the prompts, their order or the seed differ."""
        if state["data"] != self._fingerprint:
            raise DataError("the checkpoint was made with other training prompts, another seed or another data.shuffle")
        self._next = state["consumed"]
        self._put_back = tuple(state["put_back"])

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        return epoch_order(len(self._prompts), epoch, shuffle=self._shuffle, seed=self._seed)


def epoch_order(count: int, epoch: int, *, shuffle: bool, seed: int) -> Sequence[int]:
    """Return the indices 0 to count - 1 in the order of one epoch: a function of (seed, epoch) alone."""
    if not shuffle:
        return range(count)
    order = array("I", range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def fingerprint(prompts: Sequence[Prompt], *, shuffle: bool, seed: int) -> str:
    """Return a digest of what determines the training order: the prompts, their order, shuffling and seed."""
    digest = hashlib.sha256(f"{seed}\n{shuffle}".encode())
    for prompt_id in prompts.prompt_ids() if isinstance(prompts, Blend) else (prompt.prompt_id for prompt in prompts):
        digest.update(f"\n{prompt_id}".encode())
    return digest.hexdigest()[:16]
