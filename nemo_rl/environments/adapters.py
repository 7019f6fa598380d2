"""Environments of other shapes behind our protocol: reward functions, and NeMo-RL's environment classes."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nemo_rl.environments.blocking import BlockingCalls, is_async
from nemo_rl.environments.contract import StepResult, failure_of
from nemo_rl.errors import ConfigError, EnvironmentContractError
from nemo_rl.types import EnvStep, FailureClass, Message, Role

FUNCTION_THREADS = 16  # calls at once of a function that is not async
ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def plain_messages(conversation: Sequence[Message]) -> list[dict[str, str]]:
    """New dicts of role and content: what code that is not ours sees of a conversation."""
    return [{"role": message.role, "content": message.content} for message in conversation]


class FunctionEnvironment:
    """A reward function of a whole conversation; one turn, and then it is done.

    A number becomes the reward `{name: number}`, a dict the rewards of its names. What the function raises, or a call
    longer than `timeout_s`, fails the item that it was called for. Functions that are not async run in threads.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._function = function
        self._is_async = is_async(function)
        self._blocking_calls = BlockingCalls(f"env-{name}", FUNCTION_THREADS)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await asyncio.gather(*map(self._score, conversations, states))

    async def _score(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        call = partial(self._function, plain_messages(conversation), dict(state))
        try:
            if self._is_async:
                score = await asyncio.wait_for(call(), self._timeout_s)
            else:
                score = await self._blocking_calls.run(call, timeout_s=self._timeout_s)
            scores = score if isinstance(score, Mapping) else {self._name: score}
            return EnvStep(rewards={str(name): float(value) for name, value in scores.items()}, state=state)
        except Exception as error:  # the boundary to the user's function
            return failure_of(error, FailureClass.REWARD)

    async def close(self) -> None:
        pass


def is_nemo_rl_environment(target: object) -> bool:
    """Whether it is a class with NeMo-RL's `step(message_log_batch, metadata)`, decorated by `ray.remote` or not."""
    if is_ray_actor_class(target):
        return True
    step = getattr(target, "step", None)
    if not inspect.isclass(target) or step is None:
        return False
    parameters = list(inspect.signature(step).parameters)
    is_ours = "conversations" in parameters or inspect.iscoroutinefunction(step)
    return "message_log_batch" in parameters or not is_ours


def is_ray_actor_class(target: object) -> bool:
    """Whether `ray.remote` made it. By the names of its bases: asking Ray would load it for every other class."""
    return any((base.__module__, base.__name__) == ("ray.actor", "ActorClass") for base in type(target).__mro__)


class NemoRLEnvironment:
    """A NeMo-RL environment: `step(message_log_batch, metadata) -> EnvironmentReturn`.

    A `ray.remote` class lives in an actor of its own, any other in a thread of this process, one call at
    a time. Its role "environment"
    becomes "user". Rewards of shape [B] get the entry's name, those of [B, R] the names reward1 to rewardR.
    """

    def __init__(self, name: str, cls: Any, kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._blocking_calls = BlockingCalls(f"env-{name}", 1)
        self._actor = None
        self._inner: Any = None
        if is_ray_actor_class(cls):
            from nemo_rl.distributed.actors import spawn_actor, undecorated  # loads Ray

            self._actor = spawn_actor(undecorated(cls), **kwargs)
            return
        try:
            self._inner = cls(**kwargs)
        except Exception as error:  # a user's own constructor
            problem = f"{cls.__name__}: {type(error).__name__}: {error}"
            raise ConfigError(f"env.{name}.kwargs", dict(kwargs), problem) from error

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        message_logs = [plain_messages(conversation) for conversation in conversations]
        returned = await self._call("step", message_logs, [dict(state) for state in states])
        rewards = _rows(returned.rewards)
        terminated = _rows(returned.terminateds)
        count = len(conversations)
        columns = (returned.observations, returned.metadata, rewards, terminated)
        if any(len(column) != count for column in columns):
            raise EnvironmentContractError(f"{[len(column) for column in columns]} results for {count} items")
        stop_strings: Any = returned.next_stop_strings or [None] * count
        answers: Any = getattr(returned, "answers", None) or [None] * count  # older EnvironmentReturns have none
        return [
            EnvStep(
                observation=_observation(returned.observations[i]),
                rewards=self._named(rewards[i]),
                done=bool(terminated[i]),
                state=returned.metadata[i] or {},
                stop_strings=None if stop_strings[i] is None else tuple(stop_strings[i]),
                answer=None if answers[i] is None else str(answers[i]),
            )
            for i in range(count)
        ]

    async def close(self) -> None:
        if self._actor is not None:
            self._actor.kill()
        elif callable(getattr(self._inner, "shutdown", None)):
            await self._call("shutdown")

    async def _call(self, method: str, *args: Any) -> Any:
        if self._actor is not None:
            return await self._actor.call(method, *args)
        function = getattr(self._inner, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self._blocking_calls.run(partial(function, *args))

    def _named(self, reward: float | list[float]) -> dict[str, float]:
        if isinstance(reward, list):
            return {f"reward{i}": float(component) for i, component in enumerate(reward, start=1)}
        return {self._name: float(reward)}


def _rows(values: Any) -> list[Any]:
    """A tensor, an array or a sequence as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _observation(message: Mapping[str, Any] | None) -> tuple[Message, ...]:
    if not message or not message.get("content"):
        return ()
    return (Message(ROLES.get(message["role"], "user"), str(message["content"])),)
