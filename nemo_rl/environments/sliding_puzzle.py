"""The environment `sliding_puzzle`, a game of several turns: slide the tiles of a square board into order."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.environments.boundary import StepResult, step_each
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, FailureClass, Message

ACTION = re.compile(r"<action>\s*(\w+)\s*</action>", re.IGNORECASE)
WORD = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
# Offset from the gap to the tile that moves: "up" slides the tile below the gap up.
SOURCES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
OPPOSITES = {"up": "down", "down": "up", "left": "right", "right": "left"}
NUM_PUZZLES = 1000  # default size of the dataset
PUZZLES_PER_SEED = 1_000_003  # no two datasets share a puzzle's seed
RULES = (
    "Slide the tiles of this board until they are in order, row by row, with the gap (0) last.\n"
    "Each message makes one move: <action>up</action> slides the tile below the gap up; down, left and right alike.\n"
)


class SlidingPuzzleEnvironmentConfig(EnvironmentConfig):
    """A game of several turns: slide tiles until they are in order."""

    move_reward: float = 0.0  # added for each legal move
    invalid_move_penalty: float = 0.0  # subtracted for an illegal or missing move
    max_moves: int | None = Field(default=None, gt=0)  # actions after which a game ends; None: grpo.max_rollout_turns


class SlidingPuzzleEnvironment:
    """One move per turn; reward `sliding_puzzle` is 1 when solved.

    Reward `moves` adds `move_reward` for each legal move and subtracts `invalid_move_penalty` for an illegal or
    missing one; the board is then shown again. A response without an action is none of `max_moves`. States come from
    `generate_puzzle`.
    """

    def __init__(self, name: str, section: SlidingPuzzleEnvironmentConfig) -> None:
        self._section = section

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._step_one, conversations, states, FailureClass.REWARD)

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        response, size, board = conversation[-1].content, int(state["size"]), tuple(state["board"])
        action = parse_action(response)
        moved = None if action is None else slide(board, size, action)
        limit, is_over = self._section.max_moves, False
        if limit is not None:
            num_moves = int(state.get("num_moves", 0)) + (action is not None)
            is_over, state = num_moves >= limit, {**state, "num_moves": num_moves}
        if moved is None:
            problem = "That is no move" if action is None else f"No tile can move {action}"
            observation = Message("user", f"{problem}.\n{render(board, size)}")
            penalty = {"moves": -self._section.invalid_move_penalty, "sliding_puzzle": 0.0}
            return EnvStep((observation,), rewards=penalty, done=is_over, state=state)
        solved = moved == solved_board(size)
        text = "Solved." if solved else render(moved, size)
        return EnvStep(
            (Message("user", text),),
            rewards={"moves": self._section.move_reward, "sliding_puzzle": float(solved)},
            done=solved or is_over,
            state={**state, "board": list(moved)},
            answer=action,
        )

    async def close(self) -> None:
        """Do nothing: no resources are held."""


SLIDING_PUZZLE = Entry(SlidingPuzzleEnvironmentConfig, make=SlidingPuzzleEnvironment)


def parse_action(response: str) -> str | None:
    """Return the last <action>, else the last word that is a direction; None if it is not a direction."""
    found = ACTION.findall(response) or WORD.findall(response)
    action = found[-1].lower() if found else None
    return action if action in SOURCES else None


def slide(board: tuple[int, ...], size: int, action: str) -> tuple[int, ...] | None:
    """Return the board after the move; None if no tile can move that way."""
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
    """Return the tiles in order, with the gap (0) last."""
    return (*range(1, size * size), 0)


def render(board: Sequence[int], size: int) -> str:
    """Return the board as text, one line per row, columns aligned."""
    width = len(str(size * size - 1))
    rows = [board[i : i + size] for i in range(0, size * size, size)]
    return "\n".join(" ".join(f"{tile:>{width}}" for tile in row) for row in rows)


def generate_puzzle(size: int, shuffle_moves: int, seed: int) -> dict[str, Any]:
    """Return a state {"size", "board"}: the solved board after random moves, none of which undoes the previous one.

    The board is solvable in at most that many moves, and never solved already. Raises ValueError for a board smaller
    than 2 x 2 or without moves.
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


def puzzle_rows(section: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the dataset `nemo_rl.environments.sliding_puzzle.puzzle_rows`: `section.size` puzzles (1000).

    `task_kwargs` sets the difficulty: `size` of the board (3) and `shuffle_moves` (10), each a number, or a list of the
    least and the greatest, between which each puzzle's is drawn. Raises ConfigError for any other key or value.
    """
    kwargs = {"size": 3, "shuffle_moves": 10} | section.task_kwargs
    for index in range(section.size or NUM_PUZZLES):
        puzzle_seed = seed * PUZZLES_PER_SEED + index
        try:
            drawn = {name: _draw(value, f"{name}/{puzzle_seed}") for name, value in kwargs.items()}
            state = generate_puzzle(**drawn, seed=puzzle_seed)
        except (TypeError, ValueError) as error:
            raise ConfigError("task_kwargs", section.task_kwargs, str(error)) from error
        yield {"messages": [{"role": "user", "content": RULES + render(state["board"], state["size"])}], **state}


def _draw(value: Any, seed: str) -> Any:
    """Return a number drawn from `[least, greatest]`, or a value that is no list as it is."""
    if not isinstance(value, list):
        return value
    least, greatest = value
    return random.Random(seed).randint(least, greatest)
