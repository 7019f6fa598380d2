"""Copies of states: deep, and as `copy.deepcopy` makes them where they hold more than plain data."""

from collections import Counter
from typing import Any

from nemo_rl.environments.states import copy_state


def test_a_plain_state_is_copied_to_its_depth():
    state = {"plain": [1, {"a": "b"}, None, 1.5], "pair": ([1],)}
    copied = copy_state(state)
    assert copied == state
    assert copied["plain"] is not state["plain"]
    assert copied["plain"][1] is not state["plain"][1]
    assert copied["pair"][0] is not state["pair"][0]


def test_a_state_of_other_objects_is_copied_as_by_deepcopy():
    board: list[Any] = [0]
    copied = copy_state({"board": board, "game": (board,), 3: Counter("aab")})
    copied["board"].append(1)
    assert copied["game"] == ([0, 1],)  # one list in two places
    assert (board, type(copied[3])) == ([0], Counter)
    board.append(board)
    assert copy_state(board)[1][1][0] == 0
