"""Trees of the prefixes that sequences share, and packs of sequences by the tokens of their trees.

Sequences that begin with the same tokens are one path of a tree until they part, so a tree has one token for each
distinct prefix of its sequences. Tokens that went to different experts (`routes`) part too. In descending
lexicographic order neighbours share the most, and each sequence adds only what follows the prefix that it shares with
the one before it: a branch. A tree is laid out as one row of N tokens, branch after branch. Pure data in NumPy; S
sequences of at most T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ENTRIES_PER_TOKEN = 32  # entries of [S, T] with padding, the shape of scores, per token of a pack's budget


@dataclass(frozen=True, slots=True)
class Branch:
    """Consecutive tokens of one sequence, from where it diverges from the sequences before it."""

    sequence: int  # a sequence that contains it
    start: int  # tokens of that sequence before the branch: its path from the root
    first: int  # position of its first token in the row
    length: int  # 1 or more


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The distinct prefixes of sequences, each with the position in the row of its last token.

    Example: the sequences (5, 6, 7), (5, 6, 8) and (5,) are the row 5, 6, 8, 7 of two branches.
    """

    branches: tuple[Branch, ...]  # the row's order; a branch follows those of its path
    positions: np.ndarray  # [S, T] int64: of each token in the row; 0 for padding
    depths: np.ndarray  # [N] int64: tokens before it on its path, which is its position in its sequences
    sources: np.ndarray  # [N] int64: an entry of the flattened [S, T] that has the token

    @classmethod
    def of(cls, token_ids: np.ndarray, lengths: Sequence[int], routes: np.ndarray | None = None) -> "PrefixTree":
        """Return the tree of right-padded rows [S, T] with at least one token each; `routes` are [S, T, ...]."""
        order, shared = sort_by_prefix(token_ids, lengths, routes)
        width = token_ids.shape[1]
        positions = np.zeros(token_ids.shape, np.int64)
        branches: list[Branch] = []
        num_tokens, previous = 0, positions[0]
        for sequence, start in zip(order.tolist(), shared.tolist(), strict=True):
            length = lengths[sequence] - start
            path = positions[sequence]
            path[:start] = previous[:start]
            path[start : start + length] = np.arange(num_tokens, num_tokens + length)
            if length:
                branches.append(Branch(sequence, start, num_tokens, length))
            num_tokens += length
            previous = path
        depths = np.concatenate([np.arange(b.start, b.start + b.length) for b in branches])
        rows = np.repeat([b.sequence for b in branches], [b.length for b in branches])
        return cls(tuple(branches), positions, depths, rows * width + depths)

    @property
    def num_tokens(self) -> int:
        """Return the number of distinct prefixes."""
        return len(self.depths)

    def path(self, branch: Branch) -> np.ndarray:
        """Return the positions in the row of the tokens from the root to the branch's last."""
        return self.positions[branch.sequence, : branch.start + branch.length]


def sort_by_prefix(
    token_ids: np.ndarray, lengths: Sequence[int], routes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the descending lexicographic order of rows [S, T], and the tokens that each shares with the one before.

    A sequence comes before its own prefixes, which therefore add no branch. Both results are [S] int64, and the second
    is in the order of the first. Tokens with other `routes` [S, T, ...] differ.
    """
    rows = np.ascontiguousarray(token_ids, dtype=">u4")  # whose bytes compare as the numbers do
    if routes is not None:
        beside = np.ascontiguousarray(routes).reshape(*rows.shape, -1).view(np.uint8)
        rows = np.concatenate([rows.view(np.uint8).reshape(*rows.shape, -1), beside], axis=-1)
    order = sorted(range(len(rows)), key=lambda i: rows[i, : lengths[i]].tobytes(), reverse=True)
    shared = [0]
    for one, other in pairwise(order):
        length = min(lengths[one], lengths[other])
        differs = rows[one, :length] != rows[other, :length]
        differs = np.flatnonzero(differs if routes is None else differs.any(axis=-1))
        shared.append(int(differs[0]) if len(differs) else length)
    return np.array(order, np.int64), np.array(shared[: len(order)], np.int64)


class TreeSizes:
    """Tokens of the trees of any of some sequences, which are named by their rank in `order`."""

    def __init__(self, token_ids: np.ndarray, lengths: Sequence[int], routes: np.ndarray | None = None) -> None:
        self.order, shared = sort_by_prefix(token_ids, lengths, routes)
        self.lengths = np.asarray(lengths, np.int64)[self.order]  # indexed by rank
        self._minima = [shared]  # the least of 1, 2, 4, ... entries from each one on
        for level in range(len(shared).bit_length() - 1):
            step = 1 << level
            self._minima.append(np.minimum(self._minima[-1][:-step], self._minima[-1][step:]))

    def added(self, members: np.ndarray) -> np.ndarray:
        """Return the tokens that each of some ranks, in ascending order, adds to the tree of those before it."""
        added = self.lengths[members]
        added[1:] -= self._shared(members[:-1] + 1, members[1:] + 1)
        return added

    def tokens(self, members: np.ndarray) -> int:
        """Return the tokens of the tree of some ranks in ascending order."""
        return int(self.added(members).sum())

    def fit(self, members: np.ndarray, capacity: int, max_entries: int) -> bool:
        """Return whether some ranks in ascending order are a tree of `capacity` tokens and rows of `max_entries`."""
        return self.tokens(members) <= capacity and len(members) * int(self.lengths[members].max()) <= max_entries

    def _shared(self, first: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the least entry of each range, none of which is empty."""
        minima = np.empty_like(first)
        levels = np.frexp((end - first).astype(np.float64))[1] - 1
        for level in np.unique(levels):
            at = levels == level
            table = self._minima[level]
            minima[at] = np.minimum(table[first[at]], table[end[at] - (1 << int(level))])
        return minima


def pack_trees(
    token_ids: np.ndarray,
    lengths: Sequence[int],
    groups: Sequence[int],
    capacity: int,
    num_ranks: int = 1,
    routes: np.ndarray | None = None,
) -> list[tuple[list[int], int]]:
    """Return packs of rows [S, T] with the tokens of their trees: each row is in one pack of at most `capacity` tokens.

    The rows of a pack, padded to its longest, have at most ENTRIES_PER_TOKEN times as many entries: without that bound
    any number of beginnings of one history would be a pack.
    A group is in one pack unless it needs more than one, or there are ranks that would have none. The number of packs
    is a multiple of `num_ranks`; on several ranks the largest pack is made small. A pack may be empty.

    Example: two groups of 4 sequences with 90 tokens of prompt and 10 of response in 256: one pack of 2 * 130 tokens
    does not fit, so each group has a pack.
    """
    sizes = TreeSizes(token_ids, lengths, routes)
    max_entries = ENTRIES_PER_TOKEN * capacity
    units = _units(sizes, groups, capacity, max_entries)
    packs = _fill(sizes, units, capacity, max_entries)
    number = -(-len(packs) // num_ranks) * num_ranks
    if num_ranks > 1 and packs:
        packs = _balance(sizes, units, number, capacity, max_entries)
    while 0 < len(packs) < number and _split_largest(sizes, packs):
        pass
    packs += [np.zeros(0, np.int64)] * (number - len(packs))
    return [(sorted(sizes.order[pack].tolist()), sizes.tokens(pack)) for pack in packs]


def _units(sizes: TreeSizes, groups: Sequence[int], capacity: int, max_entries: int) -> list[np.ndarray]:
    """Return the ranks of each group, in the order of their first; a group that does not fit is cut between
    neighbours."""
    members: dict[int, list[int]] = {}
    for rank, sequence in enumerate(sizes.order.tolist()):
        members.setdefault(groups[sequence], []).append(rank)
    units: list[np.ndarray] = []
    for ranks in members.values():
        group = np.array(ranks)
        if sizes.fit(group, capacity, max_entries):
            units.append(group)
        else:
            units += _fill(sizes, [group[i : i + 1] for i in range(len(group))], capacity, max_entries)
    return units


def _fill(sizes: TreeSizes, units: Sequence[np.ndarray], capacity: int, max_entries: int) -> list[np.ndarray]:
    """Return packs of consecutive units, each filled before the next; a unit that is too large is a pack."""
    packs: list[np.ndarray] = []
    for unit in units:
        together = np.sort(np.concatenate([packs[-1], unit])) if packs else unit
        if packs and sizes.fit(together, capacity, max_entries):
            packs[-1] = together
        else:
            packs.append(unit)
    return packs


def _balance(
    sizes: TreeSizes, units: Sequence[np.ndarray], number: int, capacity: int, max_entries: int
) -> list[np.ndarray]:
    """Return at most `number` packs of consecutive units, with the least bound on their tokens to within 1%."""
    low, high = max(sizes.tokens(unit) for unit in units), capacity
    best = _fill(sizes, units, high, max_entries)
    while high - low > max(low // 100, 1):
        middle = (low + high) // 2
        packs = _fill(sizes, units, middle, max_entries)
        if len(packs) <= number:
            best, high = packs, middle
        else:
            low = middle
    return best


def _split_largest(sizes: TreeSizes, packs: list[np.ndarray]) -> bool:
    """Split the largest pack in two, so that the larger part is as small as possible; return False if it cannot
    be smaller."""
    largest = max(range(len(packs)), key=lambda i: sizes.tokens(packs[i]))
    pack = packs[largest]
    added = sizes.added(pack)
    left = added.cumsum()[:-1]
    right = added.sum() - left + (sizes.lengths[pack] - added)[1:]
    if not len(left) or np.maximum(left, right).min() >= added.sum():
        return False
    cut = int(np.maximum(left, right).argmin()) + 1
    packs[largest : largest + 1] = [pack[:cut], pack[cut:]]
    return True
