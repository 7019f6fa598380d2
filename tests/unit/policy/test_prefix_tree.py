from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.policy.prefix_tree import ENTRIES_PER_TOKEN, PrefixTree, TreeSizes, pack_trees

# few tokens, so that many prefixes are shared
SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


def padded(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, list[int]]:
    lengths = [len(tokens) for tokens in sequences]
    token_ids = np.full((len(sequences), max(lengths)), 0)
    for row, tokens in zip(token_ids, sequences, strict=True):
        row[: len(tokens)] = tokens
    return token_ids, lengths


def prefixes(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """Return the distinct prefixes: the oracle."""
    return {tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens) + 1)}


def test_tree_of_three_sequences() -> None:
    token_ids, lengths = padded([(5, 6, 7), (5, 6, 8), (5,)])
    tree = PrefixTree.of(token_ids, lengths)
    assert token_ids.ravel()[tree.sources].tolist() == [5, 6, 8, 7]
    assert tree.depths.tolist() == [0, 1, 2, 2]
    assert tree.positions.tolist() == [[0, 1, 3], [0, 1, 2], [0, 0, 0]]
    assert [(b.start, b.first, b.length) for b in tree.branches] == [(0, 0, 3), (2, 3, 1)]


@given(SEQUENCES)
def test_computed_tokens_are_the_distinct_prefixes(sequences: list[list[int]]) -> None:
    token_ids, lengths = padded(sequences)
    tree = PrefixTree.of(token_ids, lengths)
    assert tree.num_tokens == len(prefixes(sequences))
    row = token_ids.ravel()[tree.sources]
    path_at: dict[int, tuple[int, ...]] = {}
    for tokens, positions in zip(sequences, tree.positions, strict=True):
        path = positions[: len(tokens)]
        assert row[path].tolist() == tokens
        assert tree.depths[path].tolist() == list(range(len(tokens)))
        for end, position in enumerate(path.tolist(), start=1):
            assert path_at.setdefault(position, tuple(tokens[:end])) == tuple(tokens[:end])
    assert set(path_at) == set(range(tree.num_tokens))
    for branch in tree.branches:
        assert tree.path(branch)[branch.start :].tolist() == list(range(branch.first, branch.first + branch.length))
        assert (tree.path(branch)[: branch.start] < branch.first).all()


@given(SEQUENCES, st.data())
def test_sizes_of_any_members_are_those_of_their_trees(sequences: list[list[int]], data: st.DataObject) -> None:
    sizes = TreeSizes(*padded(sequences))
    chosen = data.draw(st.sets(st.integers(0, len(sequences) - 1), min_size=1))
    members = np.array(sorted(chosen))
    assert sizes.tokens(members) == len(prefixes([sequences[i] for i in sizes.order[members]]))


@given(SEQUENCES, st.integers(1, 3), st.integers(7, 30), st.integers(1, 4))
def test_each_sequence_is_in_one_pack_within_the_budget(
    sequences: list[list[int]], group_size: int, capacity: int, num_ranks: int
) -> None:
    groups = [i // group_size for i in range(len(sequences))]
    packs = pack_trees(*padded(sequences), groups, capacity, num_ranks)
    assert sorted(i for pack, _ in packs for i in pack) == list(range(len(sequences)))
    assert len(packs) % num_ranks == 0
    for pack, tokens in packs:
        assert tokens == len(prefixes([sequences[i] for i in pack])) <= capacity
    if num_ranks == 1:
        for group in set(groups):
            members = [i for i, of in enumerate(groups) if of == group]
            if len(prefixes([sequences[i] for i in members])) <= capacity:
                assert sum(bool(set(members) & set(pack)) for pack, _ in packs) == 1


def test_groups_stay_together_and_ranks_get_equal_trees() -> None:
    """Four groups of 4: 90 tokens of prompt and 10 of each response, 130 together."""
    sequences = [[g] * 90 + [10 + i] * 10 for i in range(4) for g in range(4)]
    groups = [g for _ in range(4) for g in range(4)]
    token_ids, lengths = padded(sequences)
    two = pack_trees(token_ids, lengths, groups, 270)
    assert [tokens for _, tokens in two] == [260, 260]
    assert [len({groups[i] for i in pack}) for pack, _ in two] == [2, 2]
    ranks = pack_trees(token_ids, lengths, groups, 1000, num_ranks=2)
    assert [tokens for _, tokens in ranks] == [260, 260]
    one_group = pack_trees(token_ids[::4], lengths[::4], [0] * 4, 1000, num_ranks=2)
    assert [(len(pack), tokens) for pack, tokens in one_group] == [(2, 110), (2, 110)]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_rows_of_a_pack_are_bounded_also_where_they_add_no_tokens(num_ranks: int) -> None:
    """A hundred copies of one sequence of 40 tokens are a tree of 40, but 4,000 entries."""
    capacity = 50
    packs = pack_trees(*padded([list(range(40))] * 100), [0] * 100, capacity, num_ranks)
    assert sorted(i for pack, _ in packs for i in pack) == list(range(100))
    assert max(len(pack) * 40 for pack, _ in packs) <= ENTRIES_PER_TOKEN * capacity
    assert len(packs) == 3


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_history_and_its_beginnings_are_one_pack(num_ranks: int) -> None:
    """A second rank would compute nearly all of it again."""
    history = list(range(40))
    packs = pack_trees(*padded([history[:n] for n in (10, 20, 30, 40)]), [0] * 4, 64, num_ranks)
    assert packs[0] == ([0, 1, 2, 3], 40)
    assert packs[1:] == [([], 0)] * (num_ranks - 1)


def test_tokens_of_other_experts_are_not_shared() -> None:
    """Of three rows 7, 8, 9 the second was computed by other experts from its second token on."""
    tokens, lengths = padded([[7, 8, 9]] * 3)
    routes = np.zeros((3, 3, 2, 2), np.uint16)
    routes[1, 1:, 1, 0] = 256
    tree = PrefixTree.of(tokens, lengths, routes)
    assert tree.num_tokens == 5
    assert (tree.positions[0] == tree.positions[2]).all()
    assert (tree.positions[0] == tree.positions[1]).tolist() == [True, False, False]
    assert pack_trees(tokens, lengths, [0] * 3, 8, routes=routes) == [([0, 1, 2], 5)]
