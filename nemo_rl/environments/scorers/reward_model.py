"""A reward model of our own: on a thread of this process, or in Ray actors, of which the least busy one is asked."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from nemo_rl.config.scorers import RewardModelScorerConfig
from nemo_rl.distributed.actors import ActorHandle, spawn_actor
from nemo_rl.distributed.cluster import ReservedSlot
from nemo_rl.distributed.load_balancer import LoadBalancer
from nemo_rl.distributed.machine import resolve_device
from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.environments.scorers.classifier import (
    check_layout_exact,
    clamp_to_positions,
    iter_micro_batches,
    load_classifier,
    score_packed,
    score_padded,
)
from nemo_rl.environments.scorers.classify import ConversationTokenizer
from nemo_rl.errors import ConfigError, EnvironmentContractError, WorkerDied, WorkerError
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.types import Failure, FailureClass, Message

logger = logging.getLogger(__name__)

Conversation = tuple[Message, ...]


class RewardModel:
    """The model itself; used by one thread. Raises ConfigError below `scorers.<name>` where it cannot be had."""

    def __init__(self, name: str, section: RewardModelScorerConfig) -> None:
        key = f"scorers.{name}"
        device = resolve_device(section.device, f"{key}.device")
        model = load_classifier(f"{key}.model_name", section.model_name, precision=section.precision)
        self._model = model.to(device)  # pyright: ignore[reportArgumentType]
        self._scores = score_packed if section.packing else score_padded
        named, value = ("packing", True) if section.packing else ("model_name", section.model_name)
        check_layout_exact(f"{key}.{named}", value, self._model, self._scores)
        self._micro_batch_size = section.micro_batch_size
        self._tokens = ConversationTokenizer.load(
            key,
            section.tokenizer_name or section.model_name,
            chat_template=section.chat_template,
            max_length=clamp_to_positions(self._model, section.max_length),
        )

    @torch.inference_mode()
    def score(self, conversations: Sequence[Conversation]) -> list[float | Failure]:
        """One score a conversation, in order; what is too long, cannot be rendered or meets an error fails alone, or
        with its micro-batch."""
        results = [self._encode(conversation) for conversation in conversations]
        rows = {place: row for place, row in enumerate(results) if not isinstance(row, Failure)}
        scores: list[float | Failure] = [
            row if isinstance(row, Failure) else _missing_score_failure() for row in results
        ]
        places = list(rows)
        for batch in iter_micro_batches(list(rows.values()), self._micro_batch_size):
            batch_scores = self._forward([rows[places[i]] for i in batch])
            for i, score in zip(batch, batch_scores, strict=True):
                scores[places[i]] = score
        return scores

    def _encode(self, conversation: Conversation) -> list[int] | Failure:
        try:
            token_ids = self._tokens.encode(conversation)
        except Exception as error:  # too long, or whatever a template's expressions raise
            return error_to_failure(error, FailureClass.REWARD)
        return token_ids or Failure(FailureClass.REWARD, "the conversation has no tokens")

    def _forward(self, rows: Sequence[Sequence[int]]) -> Sequence[float | Failure]:
        try:
            return self._scores(self._model, rows).tolist()
        except (RuntimeError, IndexError) as error:  # out of memory; a token that the model does not have
            return [error_to_failure(error, FailureClass.REWARD)] * len(rows)


class RewardModelScorer:
    """`RewardModel` behind interfaces.Scorer, in any number of requests a call.

    With `in_actor`, an actor that dies fails the requests that it holds, and another takes its place. `slots`: one an
    actor, on reserved resources; None: wherever Ray has room, without a GPU.
    """

    def __init__(
        self, name: str, section: RewardModelScorerConfig, *, slots: Sequence[ReservedSlot] | None = None
    ) -> None:
        places: Sequence[ReservedSlot | None] = slots or [None] * section.num_replicas
        self._replicas: list[_ActorReplica] | list[_ThreadReplica]
        self._load_balancer = LoadBalancer(range(len(places) if section.in_actor else 1))  # counts conversations
        if not section.in_actor:
            self._replicas = [_ThreadReplica(name, section)]
            return
        self._replicas = [_ActorReplica(name, section, slot) for slot in places]
        try:
            for replica in self._replicas:
                replica.wait_until_loaded()
        except Exception:
            for replica in self._replicas:
                replica.kill()
            raise

    async def score(self, requests: Sequence[ScoreRequest]) -> list[float | Failure]:
        conversations = [request.messages for request in requests]
        share = max(1, -(-len(conversations) // len(self._replicas)))
        shares = [conversations[start : start + share] for start in range(0, len(conversations), share)]
        results = await asyncio.gather(*(self._score_shard(each) for each in shares))
        return [score for shard_scores in results for score in shard_scores]

    async def close(self) -> None:
        for replica in self._replicas:
            replica.kill()

    async def _score_shard(self, conversations: Sequence[Conversation]) -> Sequence[float | Failure]:
        with self._load_balancer.lease(work=len(conversations)) as index:
            return await self._replicas[index].score(conversations)


class _ThreadReplica:
    """The model on one thread of this process, as torch's modes and streams want it."""

    def __init__(self, name: str, section: RewardModelScorerConfig) -> None:
        self._executor = ThreadPoolExecutor(
            1, f"scorer-{name}", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._model = self._executor.submit(RewardModel, name, section).result()

    async def score(self, conversations: Sequence[Conversation]) -> Sequence[float | Failure]:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._model.score, conversations)

    def kill(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class _ActorReplica:
    """The model in an actor; one that has died is replaced."""

    def __init__(self, name: str, section: RewardModelScorerConfig, slot: ReservedSlot | None) -> None:
        self._name = name
        self._section = section
        self._seat = slot
        self._actor = self._spawn()

    def wait_until_loaded(self) -> None:
        """Raises ConfigError for what the actor cannot load, or when it does not answer in time."""
        try:
            load_error = self._actor.call_blocking("refusal", timeout_s=self._section.start_timeout_s)
        except WorkerError as error:
            raise ConfigError(f"scorers.{self._name}.in_actor", True, str(error)) from error
        if load_error is not None:
            raise ConfigError(*load_error)

    async def score(self, conversations: Sequence[Conversation]) -> Sequence[float | Failure]:
        actor = self._actor
        try:
            return await actor.call("score", conversations)
        except WorkerDied as error:
            if self._actor is actor:  # the first of its calls to hear of it
                logger.warning("the actor of scorers.%s has died and is started again: %s", self._name, error)
                self._actor = self._spawn()
            return [error_to_failure(error, FailureClass.REWARD)] * len(conversations)
        except WorkerError as error:
            return [error_to_failure(error, FailureClass.REWARD)] * len(conversations)

    def kill(self) -> None:
        self._actor.kill()

    def _spawn(self) -> ActorHandle:
        return spawn_actor(_RewardModelActor, self._name, self._section, slot=self._seat, label=f"scorers.{self._name}")


class _RewardModelActor:
    """What stands in the actor: the model, or why it cannot be had."""

    def __init__(self, name: str, section: RewardModelScorerConfig) -> None:
        self._load_error: ConfigError | None = None
        try:
            self._model = RewardModel(name, section)
        except ConfigError as error:
            self._load_error = error

    def load_error(self) -> tuple[str, object, str] | None:
        error = self._load_error
        return (error.key, error.value, error.problem) if error else None

    def score(self, conversations: Sequence[Conversation]) -> Sequence[float | Failure]:
        if self._load_error is not None:
            raise EnvironmentContractError(str(self._load_error))
        return self._model.score(conversations)


def _missing_score_failure() -> Failure:
    return Failure(FailureClass.REWARD, "was not scored")
