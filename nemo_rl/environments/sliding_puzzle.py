"""A game of several turns: slide the tiles of a square board until they are in order."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.config.env import SlidingPuzzleSection
from nemo_rl.environments.contract import StepResult, failure_of
from nemo_rl.environments.registry import register
from nemo_rl.types import EnvStep, FailureClass, Message, Prompt

ACTION = re.compile(r"<action>\s*(\w+)\s*</action>", re.IGNORECASE)
WORD = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
# Where the tile that moves comes from, seen from the gap: "up" slides the tile below the gap up.
SOURCES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
OPPOSITES = {"up": "down", "down": "up", "left": "right", "right": "left"}
RULES = (
    "Slide the tiles of this board until they are in order, row by row, with the gap (0) last.\n"
    "Each message makes one move: <action>up</action> slides the tile below the gap up; down, left and right alike.\n"
)


@register("sliding_puzzle")
class SlidingPuzzleEnvironment:
    """One move a turn; reward `sliding_puzzle` is 1 when solved.

    Reward `moves` adds `move_reward` for each legal move and takes away `invalid_move_penalty` for a move that the
    board does not have or a turn without one; the board is then shown again. States come from `generate_puzzle`.
    """

    def __init__(self, name: str, section: SlidingPuzzleSection) -> None:
        self._section = section

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return [self._step_one(c[-1].content, state) for c, state in zip(conversations, states, strict=True)]

    def _step_one(self, response: str, state: Mapping[str, Any]) -> StepResult:
        try:
            size, board = int(state["size"]), tuple(state["board"])
        except (KeyError, TypeError) as error:
            return failure_of(error, FailureClass.REWARD)
        action = parse_action(response)
        moved = None if action is None else slide(board, size, action)
        if moved is None:
            problem = "That is no move" if action is None else f"No tile can move {action}"
            observation = Message("user", f"{problem}.\n{render(board, size)}")
            penalty = {"moves": -self._section.invalid_move_penalty, "sliding_puzzle": 0.0}
            return EnvStep((observation,), rewards=penalty, done=False, state=state)
        solved = moved == solved_board(size)
        text = "Solved." if solved else render(moved, size)
        return EnvStep(
            (Message("user", text),),
            rewards={"moves": self._section.move_reward, "sliding_puzzle": float(solved)},
            done=solved,
            state={**state, "board": list(moved)},
            answer=action,
        )

    async def close(self) -> None:
        pass


def parse_action(response: str) -> str | None:
    """The last <action>, else the last word that is a direction."""
    found = ACTION.findall(response) or WORD.findall(response)
    action = found[-1].lower() if found else None
    return action if action in SOURCES else None


def slide(board: tuple[int, ...], size: int, action: str) -> tuple[int, ...] | None:
    """The board after the move; None where no tile can move so."""
    gap = board.index(0)
    rows, columns = SOURCES[action]
    row, column = gap // size + rows, gap % size + columns
    if not (0 <= row < size and 0 <= column < size):
        return None
    tiles = list(board)
    source = row * size + column
    tiles[gap], tiles[source] = tiles[source], 0
    return tuple(tiles)


def solved_board(size: int) -> tuple[int, ...]:
    return (*range(1, size * size), 0)


def render(board: Sequence[int], size: int) -> str:
    """One line a row, columns aligned."""
    width = len(str(size * size - 1))
    rows = [board[i : i + size] for i in range(0, size * size, size)]
    return "\n".join(" ".join(f"{tile:>{width}}" for tile in row) for row in rows)


def generate_puzzle(size: int, shuffle_moves: int, seed: int) -> dict[str, Any]:
    """A state {"size", "board"}: the solved board after `shuffle_moves` random moves, none of which undoes the last.

    Solvable in at most that many moves; never solved already.
    """
    if size < 2 or shuffle_moves < 1:
        raise ValueError(f"a board of size {size} after {shuffle_moves} moves; at least 2 and 1")
    rng = random.Random(seed)
    board, last = solved_board(size), None
    remaining = shuffle_moves
    while remaining > 0 or board == solved_board(size):
        actions = [a for a in SOURCES if last != OPPOSITES[a] and slide(board, size, a) is not None]
        last = rng.choice(actions)
        board = slide(board, size, last) or board
        remaining -= 1
    return {"size": size, "board": list(board)}


def generate_prompts(count: int, *, size: int, shuffle_moves: int, seed: int) -> tuple[Prompt, ...]:
    """Prompts of the task "sliding_puzzle", the i-th from its own seed."""
    states = [generate_puzzle(size, shuffle_moves, seed * count + i) for i in range(count)]
    return tuple(
        Prompt(
            prompt_id=f"sliding_puzzle-{seed}-{i}",
            task_name="sliding_puzzle",
            messages=(Message("user", RULES + render(state["board"], size)),),
            env_state=state,
            dataset="sliding_puzzle",
        )
        for i, state in enumerate(states)
    )
