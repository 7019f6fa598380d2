"""Environments in Ray actors. One local Ray serves the whole session."""

import asyncio

import pytest
import ray

from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.distributed.cluster import connect
from nemo_rl.environments.registry import make_environment
from nemo_rl.types import EnvStep, Failure, FailureClass, Message
from tests.unit.environments.custom import GuessEnvironment

RemoteGuessEnvironment = ray.remote(GuessEnvironment)


@pytest.fixture(autouse=True)
def local_ray() -> None:
    connect(num_cpus=2)


def test_items_are_dealt_over_actors_and_come_back_in_order() -> None:
    entry = {
        "type": "tests.unit.environments.custom:length_reward",
        "remote": {"enabled": True, "num_actors": 2},
        "batching": {"enabled": True, "max_batch_size": 4},
    }

    async def main() -> list[EnvStep | Failure]:
        environment = make_environment("length", ENVIRONMENTS.read(entry, "length", key="env.length"))
        conversations = [(Message("assistant", "a" * n),) for n in range(5)]
        states = [{"target": 4, "break": n == 3} for n in range(5)]
        try:
            return list(await environment.step(conversations, states))
        finally:
            await environment.close()

    results = asyncio.run(main())
    assert results[3] == Failure(FailureClass.REWARD, "KeyError: 'broken'")
    rewards = [result.rewards["length"] for result in results if isinstance(result, EnvStep)]
    assert rewards == [0.0, 0.25, 0.5, 1.0]


def test_nemo_rl_class_decorated_by_ray_lives_in_an_actor() -> None:
    entry = {"type": f"{__name__}:RemoteGuessEnvironment", "kwargs": {"cfg": {"number": 7}}}

    async def main() -> list[EnvStep | Failure]:
        environment = make_environment("guess", ENVIRONMENTS.read(entry, "guess", key="env.guess"))
        try:
            return list(await environment.step([(Message("assistant", "7"),)], [{}]))
        finally:
            await environment.close()

    assert asyncio.run(main()) == [EnvStep((Message("user", "right"),), rewards={"guess": 1.0}, done=True, answer="7")]
