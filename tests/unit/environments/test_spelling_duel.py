"""The spelling duel: turns, rewards and rows."""

import asyncio
from typing import Any

import pytest

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.loading import load_config
from nemo_rl.environments.boundary import RESPONSE_TRUNCATED
from nemo_rl.environments.spelling_duel import SpellingDuelEnvironment, SpellingDuelEnvironmentConfig, duel_rows
from nemo_rl.errors import ConfigError
from nemo_rl.recipes import find_recipe
from nemo_rl.types import EnvStep, Message

STATE = {"words": ["sun", "cat"], "questions": ["sun?", "cat?"]}


def play(*answers: str, cut: int | None = None) -> EnvStep:
    """Return the last step of a game; the answer of index `cut` is cut by its token limit."""
    section = SpellingDuelEnvironmentConfig(policies=["first", "second"])
    environment, state = SpellingDuelEnvironment("duel", section), dict(STATE)
    step: Any = None
    for index, answer in enumerate(answers):
        called = {**state, RESPONSE_TRUNCATED: index == cut}
        (step,) = asyncio.run(environment.step([[Message("assistant", answer)]], [called]))
        assert isinstance(step, EnvStep)
        state = {key: value for key, value in step.state.items() if key != RESPONSE_TRUNCATED}
    return step


def test_the_second_player_gets_its_own_word_after_the_first() -> None:
    step = play("nus")
    assert (step.done, step.policy, step.policy_rewards) == (False, "second", {})
    assert step.observation == (Message("user", "cat?"),)


@pytest.mark.parametrize(
    ("answers", "score"),
    [(("nus", "tac"), 0.5), (("nus", "cat"), 1.0), (("sun", "tac"), 0.0), (("x", ""), 0.5), ((" nus\n", "tca"), 1.0)],
)
def test_the_better_speller_wins(answers: tuple[str, str], score: float) -> None:
    step = play(*answers)
    assert step.done
    assert step.policy_rewards == {"first": {"spelling_duel": score}, "second": {"spelling_duel": 1 - score}}


def test_a_cut_answer_is_wrong_and_a_first_one_ends_the_game() -> None:
    assert play("nus", cut=0).policy_rewards == {"first": {"spelling_duel": 0.0}}
    assert play("nus", cut=0).done
    assert play("nus", "tac", cut=1).policy_rewards["first"] == {"spelling_duel": 1.0}


def test_rows_have_a_word_for_each_player() -> None:
    section = DatasetConfig(
        dataset_name="nemo_rl.environments.spelling_duel.duel_rows",
        task_kwargs={"min_word_len": 3, "max_word_len": 5},
        size=5,
    )
    rows = list(duel_rows(section, seed=1))
    assert [row["words"][1] for row in rows] == [row["words"][0] for row in (*rows[1:], rows[0])]
    for row in rows:
        assert row["messages"] == [{"role": "user", "content": row["questions"][0]}]
        assert all(question.endswith(word) for question, word in zip(row["questions"], row["words"], strict=True))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.spelling_duel.policies=[first]", r"env\.spelling_duel\.policies = \['first'\]: names the two policies"),
        ("grpo.max_rollout_turns=1", r"grpo\.max_rollout_turns = 1: env\..* is a game of 2 turns"),
    ],
)
def test_two_policies_need_a_turn_each(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(find_recipe("self_play"), [override])
