"""What holds for every environment, however it is wrapped: interfaces.Environment."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.environments.registry import make_environment
from nemo_rl.environments.sliding_puzzle import generate_puzzle
from nemo_rl.interfaces import Environment
from nemo_rl.types import EnvStep, Failure, Message

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
every_environment = pytest.mark.parametrize("batched", [False, True], ids=["direct", "batched"])
every_name = pytest.mark.parametrize("name", BY_NAME)


Use = Callable[[Environment], Awaitable[None]]
WithEnvironment = Callable[[str, bool, Use], None]


@pytest.fixture(scope="module")
def with_environment() -> Iterator[WithEnvironment]:
    """`with_environment(name, batched, use)`: calls `use` with that environment, which is made when first asked for."""
    made: dict[tuple[str, bool], Environment] = {}

    async def main(name: str, batched: bool, use: Use) -> None:
        if (name, batched) not in made:
            entry = {**BY_NAME[name][0], "batching": {"enabled": batched, "max_batch_size": 2, "max_wait_ms": 1}}
            made[name, batched] = make_environment(name, ENVIRONMENTS.read(entry, name, key=f"env.{name}"))
        await use(made[name, batched])

    with asyncio.Runner() as runner:
        yield lambda name, batched, use: runner.run(main(name, batched, use))
        for environment in made.values():
            runner.run(environment.close())


def item(name: str, response: str | None = None) -> tuple[tuple[Message, ...], dict[str, Any]]:
    _, state, final = BY_NAME[name]
    messages = (Message("user", "?"), Message("assistant", final if response is None else response))
    return messages, {**state, "response_truncated": False}


@every_environment
@every_name
def test_each_item_gets_one_result_in_order_from_calls_that_overlap(
    name: str, batched: bool, with_environment: WithEnvironment
) -> None:
    good, other = item(name), item(name, "zzz")

    async def use(environment: Environment) -> None:
        calls = [environment.step(*zip(*items, strict=True)) for items in ([good, other, good], [other], [good])]
        mixed, others, goods = await asyncio.gather(*calls)
        assert [len(mixed), len(others), len(goods)] == [3, 1, 1]
        assert mixed[0] == mixed[2] == goods[0]
        assert mixed[1] == others[0]
        assert isinstance(goods[0], EnvStep)
        assert goods[0].done
        assert sum(goods[0].rewards.values()) > 0
        assert all(math.isfinite(reward) for reward in goods[0].rewards.values())

    with_environment(name, batched, use)


@every_environment
@every_name
def test_no_items_give_no_results(name: str, batched: bool, with_environment: WithEnvironment) -> None:
    async def use(environment: Environment) -> None:
        assert list(await environment.step([], [])) == []

    with_environment(name, batched, use)


@every_name
def test_callers_state_is_not_changed(name: str, with_environment: WithEnvironment) -> None:
    messages, state = item(name)
    before = repr(state)

    async def use(environment: Environment) -> None:
        (result,) = await environment.step([messages], [state])
        assert not isinstance(result, Failure)
        assert repr(state) == before

    with_environment(name, False, use)


def test_game_of_several_turns_is_played_to_its_end(with_environment: WithEnvironment) -> None:
    state: Any = {**generate_puzzle(2, 3, seed=1), "response_truncated": False}

    async def use(environment: Environment) -> None:
        nonlocal state
        turns, done = 0, False
        while not done:  # a 2 x 2 board turns in a circle of 12 positions
            gap = list(state["board"]).index(0)
            (step,) = await environment.step([(Message("assistant", ("left", "up", "down", "right")[gap]),)], [state])
            assert isinstance(step, EnvStep)
            done, state, turns = step.done, step.state, turns + 1
            assert turns <= 12
        assert list(state["board"]) == [1, 2, 3, 0]

    with_environment("sliding_puzzle", False, use)
