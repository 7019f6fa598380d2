"""Replicas of a reward model of this run: on a thread of this process, or in least-busy Ray actors."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from nemo_rl.distributed.load_balancer import LoadBalancer
from nemo_rl.distributed.machine import compute_in_turn
from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.environments.scorers.reward_model import RewardModelScorerConfig
from nemo_rl.errors import ConfigError, EnvironmentContractError, WorkerDied, WorkerError
from nemo_rl.types import Failure, FailureClass, Message, ResponseFault, ScoreRequest

if TYPE_CHECKING:
    from nemo_rl.distributed.actors import ActorHandle
    from nemo_rl.distributed.cluster import ReservedSlot

logger = logging.getLogger(__name__)


class RewardModelScorer:
    """A reward model as an interfaces.Scorer; a call may hold any number of requests.

    With `in_actor`, an actor that dies fails the requests that it holds, and is replaced. `slots` are reserved
    resources, one per actor; without them actors run without a GPU wherever Ray has room.
    """

    def __init__(
        self, name: str, section: RewardModelScorerConfig, *, slots: "Sequence[ReservedSlot] | None" = None
    ) -> None:
        self._replicas: list[_ActorReplica] | list[_ThreadReplica]
        actor_slots = slots or [None] * section.num_replicas
        self._load_balancer = LoadBalancer(range(len(actor_slots) if section.in_actor else 1))  # counts conversations
        if not section.in_actor:
            self._replicas = [_ThreadReplica(name, section)]
            return
        self._replicas = [_ActorReplica(name, section, slot) for slot in actor_slots]
        try:
            for replica in self._replicas:
                replica.wait_until_loaded()
        except Exception:
            for replica in self._replicas:
                replica.kill()
            raise

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure | ResponseFault]:
        conversations = [request.messages for request in requests]
        share = max(1, -(-len(conversations) // len(self._replicas)))
        shares = [conversations[start : start + share] for start in range(0, len(conversations), share)]
        results = await asyncio.gather(*(self._score_shard(each) for each in shares))
        return [score for shard_scores in results for score in shard_scores]

    async def close(self) -> None:
        for replica in self._replicas:
            replica.kill()

    async def _score_shard(
        self, conversations: Sequence[tuple[Message, ...]]
    ) -> Sequence[float | Failure | ResponseFault]:
        with self._load_balancer.lease(work=len(conversations)) as index:
            return await self._replicas[index].score(conversations)


class _ThreadReplica:
    """The model on one thread of this process, since torch's grad mode and CUDA streams are per thread."""

    def __init__(self, name: str, section: RewardModelScorerConfig) -> None:
        import torch

        from nemo_rl.environments.scorers.classifier import RewardModel

        self._executor = ThreadPoolExecutor(
            1, f"scorer-{name}", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._model = self._executor.submit(RewardModel, name, section).result()

    async def score(self, conversations: Sequence[tuple[Message, ...]]) -> Sequence[float | Failure | ResponseFault]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, compute_in_turn, self._model.score, conversations)

    def kill(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class _ActorReplica:
    """The model in an actor, which is replaced when it dies."""

    def __init__(self, name: str, section: RewardModelScorerConfig, slot: "ReservedSlot | None") -> None:
        self._name = name
        self._section = section
        self._slot = slot
        self._actor = self._spawn()

    def wait_until_loaded(self) -> None:
        """Wait for the actor; raises ConfigError for a model that cannot be loaded, or not in time."""
        try:
            load_error = self._actor.call_blocking("load_error", timeout_s=self._section.start_timeout_s)
        except WorkerError as error:
            raise ConfigError(f"scorers.{self._name}.in_actor", True, str(error)) from error
        if load_error is not None:
            raise ConfigError(*load_error)

    async def score(self, conversations: Sequence[tuple[Message, ...]]) -> Sequence[float | Failure | ResponseFault]:
        actor = self._actor
        try:
            return await actor.call("score", conversations)
        except WorkerDied as error:
            if self._actor is actor:  # else an earlier failed call has replaced it already
                logger.warning("restarting the actor of scorers.%s, which died: %s", self._name, error)
                self._actor = self._spawn()
            return [error_to_failure(error, FailureClass.REWARD)] * len(conversations)
        except WorkerError as error:
            return [error_to_failure(error, FailureClass.REWARD)] * len(conversations)

    def kill(self) -> None:
        self._actor.kill()

    def _spawn(self) -> "ActorHandle":
        from nemo_rl.distributed.actors import spawn_actor  # loads Ray

        return spawn_actor(_RewardModelActor, self._name, self._section, slot=self._slot, label=f"scorers.{self._name}")


class _RewardModelActor:
    """The model inside its actor, or why it could not be loaded."""

    def __init__(self, name: str, section: RewardModelScorerConfig) -> None:
        from nemo_rl.environments.scorers.classifier import RewardModel

        self._load_error: ConfigError | None = None
        try:
            self._model = RewardModel(name, section)
        except ConfigError as error:
            self._load_error = error

    def load_error(self) -> tuple[str, object, str] | None:
        """Return key, value and problem of the ConfigError, which is raised again in the driver."""
        error = self._load_error
        return (error.key, error.value, error.problem) if error else None

    def score(self, conversations: Sequence[tuple[Message, ...]]) -> Sequence[float | Failure | ResponseFault]:
        if self._load_error is not None:
            raise EnvironmentContractError(str(self._load_error))
        return self._model.score(conversations)
