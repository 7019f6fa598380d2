"""Environments in Ray actors, on several processes or machines."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.config.environment import EnvironmentConfig
from nemo_rl.distributed.actors import ActorHandle, spawn_actor
from nemo_rl.distributed.load_balancer import LoadBalancer
from nemo_rl.environments.boundary import StepResult, error_to_failure
from nemo_rl.environments.registry import make_environment, strip_wrappers
from nemo_rl.errors import EnvironmentContractError, WorkerError
from nemo_rl.types import Message

MAX_RESTARTS = 3  # of each actor
CLOSE_TIMEOUT_S = 30.0


class RemoteEnvironment:
    """Copies of one environment in `num_actors` actors. A call is split, and each share goes to the least busy one.

    An actor that dies fails the items that it holds and is restarted, three times at most.
    """

    def __init__(self, name: str, section: EnvironmentConfig) -> None:
        remote = section.remote
        self._timeout_s = section.timeout_s
        self._actors = [
            spawn_actor(
                _EnvironmentActor,
                name,
                strip_wrappers(section),
                max_concurrency=remote.max_concurrency,
                max_restarts=MAX_RESTARTS,
            )
            for _ in range(remote.num_actors)
        ]
        self._load_balancer = LoadBalancer(range(remote.num_actors))  # counts items

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        share = max(1, -(-len(conversations) // len(self._actors)))
        starts = range(0, len(conversations), share)
        shares = [(conversations[i : i + share], states[i : i + share]) for i in starts]
        results = await asyncio.gather(*(self._step_shard(*each) for each in shares))
        return [result for shard_results in results for result in shard_results]

    async def _step_shard(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        with self._load_balancer.lease(work=len(conversations)) as index:
            try:
                results = await self._actors[index].call("step", conversations, states, timeout_s=self._timeout_s)
                if len(results) != len(conversations):
                    raise EnvironmentContractError(f"{len(results)} results for {len(conversations)} items")
                return results
            except (WorkerError, EnvironmentContractError) as error:
                return [error_to_failure(error)] * len(conversations)

    async def close(self) -> None:
        await asyncio.gather(*map(_close_actor, self._actors))


async def _close_actor(actor: ActorHandle) -> None:
    try:
        await actor.call("close", timeout_s=CLOSE_TIMEOUT_S)
    except WorkerError:  # dead or hanging: it is killed
        pass
    finally:
        actor.kill()


class _EnvironmentActor:
    """The environment inside an actor."""

    def __init__(self, name: str, section: EnvironmentConfig) -> None:
        self._environment = make_environment(name, section)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await self._environment.step(conversations, states)

    async def close(self) -> None:
        await self._environment.close()
