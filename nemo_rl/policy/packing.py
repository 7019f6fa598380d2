"""Bin packing of sequences into packs of a limited number of tokens, and of packs into ranks. Packs are indices."""

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np

Packs = list[list[int]]  # indices of the sequences in each pack


def pack_for_ranks(lengths: Sequence[int], capacity: int, algorithm: str, num_ranks: int = 1) -> list[Packs]:
    """Return the packs of each rank: each index is in one pack, and no pack exceeds `capacity` tokens.

    The algorithm gives the number of packs, which is rounded up to a multiple of the ranks so that all have the same
    number. Sequences are then balanced over the packs if they fit. Packs computed at the same time have
    nearly the same tokens. With fewer sequences than packs some are empty.

    Example: lengths 5, 4, 3, 2 in 7: (5, 2), (4, 3) on one rank; on two one pack each.
    """
    fitted = ALGORITHMS[algorithm](lengths, capacity)
    number = -(-len(fitted) // num_ranks) * num_ranks
    packs = balance(lengths, number)
    if any(_tokens(pack, lengths) > capacity for pack in packs):
        packs = split_packs(number, fitted, lengths)
    return deal([(pack, _tokens(pack, lengths)) for pack in packs], num_ranks)


def deal(packs: Sequence[tuple[list[int], int]], num_ranks: int) -> list[Packs]:
    """Return the packs of each rank, the same number for all, so that those computed at once have similar tokens."""
    largest_first = [pack for pack, _ in sorted(packs, key=itemgetter(1), reverse=True)]
    ranks: list[Packs] = [[] for _ in range(num_ranks)]
    for start in range(0, len(packs), num_ranks):
        together = largest_first[start : start + num_ranks]
        for rank, pack in enumerate(together if start // num_ranks % 2 == 0 else reversed(together)):
            ranks[rank].append(pack)
    return ranks


def balance(lengths: Sequence[int], number: int) -> Packs:
    """Return `number` packs of nearly equal tokens: the longest remaining sequence goes to the emptiest pack."""
    packs: Packs = [[] for _ in range(number)]
    heap = [(0, pack) for pack in range(number)]
    for index in _longest_first(lengths):
        tokens, pack = heap[0]
        packs[pack].append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], pack))
    return packs


def split_packs(number: int, packs: Packs, lengths: Sequence[int]) -> Packs:
    """Return at least `number` packs: halve the fullest one with several sequences; if all have one, add empty
    packs."""
    packs = list(packs)
    while len(packs) < number:
        fullest = max(packs, key=lambda pack: (len(pack) > 1, _tokens(pack, lengths)), default=[])
        if len(fullest) < 2:
            packs.append([])
            continue
        packs.remove(fullest)
        packs += [[fullest[i] for i in half] for half in balance([lengths[i] for i in fullest], 2)]
    return packs


def concatenative(lengths: Sequence[int], capacity: int) -> Packs:
    """Pack in the given order; a sequence that does not fit into the last pack begins a new one."""
    packs: Packs = []
    free = 0
    for index, length in enumerate(lengths):
        if length > free or not packs:
            packs.append([])
            free = capacity
        packs[-1].append(index)
        free -= length
    return packs


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Packs:
    """Pack the longest first, each into the first pack with room."""
    return _first_fit(_longest_first(lengths), lengths, capacity)


def first_fit_shuffle(lengths: Sequence[int], capacity: int) -> Packs:
    """Pack in a fixed random order, each into the first pack with room."""
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    return _first_fit(order, lengths, capacity)


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Packs:
    """Pack by size class: sequences above half the capacity get a pack each, filled with the
    medium (above a third) and small (above a sixth) ones that fit best. The rest is packed first-fit-decreasing."""
    ascending = [(lengths[i], i) for i in reversed(_longest_first(lengths))]
    large = [e for e in ascending if 2 * e[0] > capacity]
    medium = [e for e in ascending if 3 * e[0] > capacity >= 2 * e[0]]
    small = [e for e in ascending if 6 * e[0] > capacity >= 3 * e[0]]
    tiny = [e for e in ascending if capacity >= 6 * e[0]]
    packs = [[index] for _, index in reversed(large)]
    free = [capacity - length for length, _ in reversed(large)]

    def move(source: list[tuple[int, int]], position: int, pack: int) -> None:
        length, index = source.pop(position)
        packs[pack].append(index)
        free[pack] -= length

    without_medium = []
    for pack in range(len(packs)):
        if medium and medium[0][0] <= free[pack]:
            move(medium, _largest_within(medium, free[pack]), pack)
        else:
            without_medium.append(pack)
    for pack in reversed(without_medium):
        if len(small) > 1 and small[0][0] + small[1][0] <= free[pack]:
            move(small, 0, pack)
            move(small, _largest_within(small, free[pack]), pack)
    left = sorted([*medium, *small, *tiny], key=itemgetter(0))
    for pack in range(len(packs)):
        while left and left[0][0] <= free[pack]:
            move(left, _largest_within(left, free[pack]), pack)
    return packs + _first_fit([index for _, index in reversed(left)], lengths, capacity)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> Packs:
    packs: Packs = []
    free = np.full(len(order) + 1, capacity)
    for index in order:
        pack = int(np.argmax(free[: len(packs) + 1] >= lengths[index]))  # the one after the last is empty
        if pack == len(packs):
            packs.append([])
        packs[pack].append(index)
        free[pack] -= lengths[index]
    return packs


def _largest_within(ascending: list[tuple[int, int]], room: int) -> int:
    return bisect_right(ascending, room, key=itemgetter(0)) - 1


def _tokens(pack: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in pack)


ALGORITHMS: dict[str, Callable[[Sequence[int], int], Packs]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "first_fit_shuffle": first_fit_shuffle,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}
