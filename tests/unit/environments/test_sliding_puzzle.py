"""Moves, penalties and the end of the sliding puzzle."""

import asyncio
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data.prompt_sets import load_prompt_sets
from nemo_rl.environments.sliding_puzzle import (
    OPPOSITES,
    SlidingPuzzleEnvironment,
    SlidingPuzzleEnvironmentConfig,
    generate_puzzle,
    parse_action,
    puzzle_rows,
    render,
    slide,
    solved_board,
)
from nemo_rl.errors import ConfigError
from nemo_rl.types import EnvStep, Failure, Message


def step_once(text: str, state: dict[str, Any], **options: float) -> EnvStep | Failure:
    environment = SlidingPuzzleEnvironment("sliding_puzzle", SlidingPuzzleEnvironmentConfig.model_validate(options))
    (result,) = asyncio.run(environment.step([(Message("user", "?"), Message("assistant", text))], [state]))
    return result


def test_solving_move_ends_the_game_with_reward_one() -> None:
    state = {"size": 2, "board": [1, 2, 0, 3]}
    assert step_once("<action>left</action>", state, move_reward=0.5) == EnvStep(
        (Message("user", "Solved."),),
        rewards={"moves": 0.5, "sliding_puzzle": 1.0},
        done=True,
        state={"size": 2, "board": [1, 2, 3, 0]},
        answer="left",
    )


def test_other_legal_move_shows_the_new_board() -> None:
    step = step_once("I go down", {"size": 2, "board": [1, 2, 0, 3]})
    assert step == EnvStep(
        (Message("user", "0 2\n1 3"),),
        rewards={"moves": 0.0, "sliding_puzzle": 0.0},
        done=False,
        state={"size": 2, "board": [0, 2, 1, 3]},
        answer="down",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [("<action>up</action>", "No tile can move up."), ("<action>jump</action>", "That is no move."), ("", "That is")],
)
def test_invalid_move_is_penalised_and_leaves_the_board(text: str, problem: str) -> None:
    state = {"size": 2, "board": [1, 2, 0, 3]}
    step = step_once(text, state, invalid_move_penalty=0.25)
    assert isinstance(step, EnvStep)
    assert step.rewards == {"moves": -0.25, "sliding_puzzle": 0.0}
    assert step.observation[0].content.startswith(problem)
    assert step.observation[0].content.endswith("1 2\n0 3")
    assert (step.done, step.state) == (False, state)


def test_state_that_is_no_puzzle_fails_its_item() -> None:
    assert isinstance(step_once("up", {}), Failure)


def test_last_tagged_action_counts_else_the_last_word() -> None:
    assert parse_action("<action>up</action> no <action> DOWN </action> left") == "down"
    assert parse_action("not up but Left.") == "left"
    assert parse_action("upper") is None


@hypothesis.given(strategies.integers(2, 4), strategies.integers(1, 30), strategies.integers(0, 10**6))
@hypothesis.settings(max_examples=50)
def test_generated_puzzles_are_repeatable_and_unsolved(size: int, moves: int, seed: int) -> None:
    state = generate_puzzle(size, moves, seed)
    assert state == generate_puzzle(size, moves, seed)
    board = tuple(state["board"])
    assert sorted(board) == list(range(size * size))
    assert board != solved_board(size)
    for action, opposite in OPPOSITES.items():
        moved = slide(board, size, action)
        assert moved is None or slide(moved, size, opposite) == board


def test_puzzle_of_one_move_is_solved_by_one_move() -> None:
    board = tuple(generate_puzzle(3, 1, seed=5)["board"])
    assert any(slide(board, 3, action) == solved_board(3) for action in OPPOSITES)


PATH = f"{puzzle_rows.__module__}.{puzzle_rows.__name__}"


def test_data_set_of_puzzles_shows_the_board_and_carries_the_state() -> None:
    section = DatasetConfig(
        dataset_name=PATH, env_name="sliding_puzzle", size=20, task_kwargs={"size": 3, "shuffle_moves": 9}
    )
    train, (held_out,) = load_prompt_sets(DataConfig(train=section, validation=section), run_seed=7)
    assert train.prompts[0].task_name == "sliding_puzzle"
    assert len(train.prompts) > 10
    for prompt in train.prompts:
        assert prompt.env_state.keys() == {"size", "board"}
        assert prompt.messages[0].content.endswith(render(prompt.env_state["board"], 3))
    assert not {p.prompt_id for p in train.prompts} & {p.prompt_id for p in held_out.prompts}


@pytest.mark.parametrize("kwargs", [{"width": 3}, {"size": 1}, {"size": "large"}])
def test_difficulty_that_no_puzzle_has_is_a_config_error(kwargs: dict[str, Any]) -> None:
    section = DatasetConfig(dataset_name=PATH, task_kwargs=kwargs)
    with pytest.raises(ConfigError, match=r"data\.train\.task_kwargs"):
        load_prompt_sets(DataConfig(train=section), run_seed=0)


def test_game_ends_with_the_last_of_its_moves_legal_or_not() -> None:
    state: dict[str, Any] = {"size": 2, "board": [1, 2, 0, 3]}
    outcomes = []
    for text in ("thinking", "<action>down</action>", "<action>down</action>"):
        step = step_once(text, state, max_moves=2)
        assert isinstance(step, EnvStep)
        state = dict(step.state)
        outcomes.append((step.done, state["num_moves"], step.rewards["sliding_puzzle"]))
    assert outcomes == [(False, 0, 0.0), (False, 1, 0.0), (True, 2, 0.0)]


def test_difficulty_of_a_range_is_drawn_for_each_puzzle() -> None:
    section = DatasetConfig(dataset_name=PATH, size=60, task_kwargs={"size": [2, 4], "shuffle_moves": [1, 9]})
    rows = list(puzzle_rows(section, seed=5))
    assert rows == list(puzzle_rows(section, seed=5))
    assert {row["size"] for row in rows} == {2, 3, 4}


@pytest.mark.parametrize("size", [[2], [4, 2], [2, "large"]])
def test_a_range_that_is_none_is_a_config_error(size: list[Any]) -> None:
    section = DatasetConfig(dataset_name=PATH, task_kwargs={"size": size})
    with pytest.raises(ConfigError, match=r"data\.train\.task_kwargs"):
        load_prompt_sets(DataConfig(train=section), run_seed=0)
