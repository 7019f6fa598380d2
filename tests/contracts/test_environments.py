"""What holds for every environment, however it is wrapped: interfaces.Environment."""

import asyncio
from typing import Any

import pytest

from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.sliding_puzzle import generate_puzzle
from nemo_rl.testing import check_environment
from nemo_rl.types import EnvStep, Message

CUSTOM = "tests.unit.environments.custom"
GCD_ENTRY = {"question": "?", "answer": "6", "metadata": {}}
# By name: the entry of `env`, a state, and a response that ends the conversation.
BY_NAME: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "math": ({"verify_timeout_s": 60}, {"answer": "6"}, "\\boxed{6}"),
    "reasoning_gym": ({}, {"task": "gcd", "entry": GCD_ENTRY}, "6"),
    "sliding_puzzle": ({}, {"size": 2, "board": [1, 2, 0, 3]}, "left"),
    "tools": ({}, {"answer": "6"}, "<answer>6</answer>"),
    "function": ({"type": f"{CUSTOM}:two_rewards"}, {"answer": "6"}, "6"),
    "class": ({"type": f"{CUSTOM}:EchoEnvironment"}, {}, "6"),
    "nemo_rl": ({"type": f"{CUSTOM}:GuessEnvironment", "kwargs": {"cfg": {"number": 6}}}, {}, "6"),
}


@pytest.mark.parametrize("batched", [False, True], ids=["direct", "batched"])
@pytest.mark.parametrize("name", BY_NAME)
def test_contract_of_environments_holds(name: str, batched: bool) -> None:
    entry, state, final = BY_NAME[name]
    check_environment(entry.get("type", name), state=state, final=final, batching=batched, **entry)


def test_game_of_several_turns_is_played_to_its_end() -> None:
    async def play() -> None:
        environment = make_environment("sliding_puzzle", ENVIRONMENTS.read({}, "sliding_puzzle"))
        state: Any = {**generate_puzzle(2, 3, seed=1), "response_truncated": False}
        turns, done = 0, False
        while not done:  # a 2 x 2 board turns in a circle of 12 positions
            gap = list(state["board"]).index(0)
            (step,) = await environment.step([(Message("assistant", ("left", "up", "down", "right")[gap]),)], [state])
            assert isinstance(step, EnvStep)
            done, state, turns = step.done, step.state, turns + 1
            assert turns <= 12
        assert list(state["board"]) == [1, 2, 3, 0]
        await environment.close()

    asyncio.run(play())
