"""The adapter of environments written for NeMo-RL: a class with `step(message_log_batch, metadata)`."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nemo_rl.config.environment import CustomEnvironmentConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.data.messages import parse_message
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import StepResult
from nemo_rl.environments.registry import messages_to_dicts
from nemo_rl.environments.user_code import contain_exit, name_user_code
from nemo_rl.errors import ConfigError, DataError, EnvironmentContractError
from nemo_rl.types import EnvStep, Message, Role

ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def adapt_environment(key: str, path: str, target: Any) -> Entry[CustomEnvironmentConfig] | None:
    """Return the entry for a class with NeMo-RL's interface, under `ray.remote` or not; None for anything else."""
    if not is_nemo_rl_environment(target):
        return None
    return Entry(CustomEnvironmentConfig, make=lambda name, section: NemoRLEnvironment(name, target, section.kwargs))


def is_nemo_rl_environment(target: object) -> bool:
    """Return whether it is a class with NeMo-RL's `step(message_log_batch, metadata)`, under `ray.remote` or not."""
    if is_ray_actor_class(target):
        return True
    step = getattr(target, "step", None)
    if not inspect.isclass(target) or step is None:
        return False
    parameters = list(inspect.signature(step).parameters)
    is_native = "conversations" in parameters or inspect.iscoroutinefunction(step)
    return "message_log_batch" in parameters or not is_native


def is_ray_actor_class(target: object) -> bool:
    """Return whether `ray.remote` made it, by the names of its bases: asking Ray would load it for every class."""
    return any((base.__module__, base.__name__) == ("ray.actor", "ActorClass") for base in type(target).__mro__)


class NemoRLEnvironment:
    """A NeMo-RL environment: `step(message_log_batch, metadata) -> EnvironmentReturn`.

    A `ray.remote` class lives in an actor of its own, any other in a thread of this process, one call at a time. Its
    role "environment" becomes "user". Metadata None keeps a conversation's own until its end. Rewards of shape [B] get
    the entry's name, those of [B, R] the names reward1 to rewardR; of a dict each has its own.
    """

    def __init__(self, name: str, cls: Any, kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._user_code = name_user_code(cls)
        self._blocking_calls = BlockingCalls(f"env-{name}", 1, user_code=self._user_code)
        self._actor = None
        self._inner: Any = None
        if is_ray_actor_class(cls):
            from nemo_rl.distributed.actors import spawn_actor  # loads Ray

            self._actor = spawn_actor(unwrap_actor_class(cls), env_vars=env_vars_of(cls), **kwargs)
            return
        try:
            self._inner = cls(**kwargs)
        except (Exception, SystemExit) as error:  # a user's own constructor
            problem = f"{cls.__name__}: {type(error).__name__}: {error}"
            raise ConfigError(f"env.{name}.kwargs", dict(kwargs), problem) from error

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        message_logs = [messages_to_dicts(conversation) for conversation in conversations]
        returned = await self._call("step", message_logs, [_to_metadata(state) for state in states])
        rewards = _rows_of(returned.rewards)
        terminated = _to_list(returned.terminateds)
        count = len(conversations)
        columns = (returned.observations, returned.metadata, rewards, terminated)
        if any(len(column) != count for column in columns):
            raise EnvironmentContractError(f"{[len(column) for column in columns]} results for {count} items")
        stop_strings: Any = returned.next_stop_strings or [None] * count
        answers: Any = getattr(returned, "answers", None) or [None] * count  # older EnvironmentReturns lack them
        return [
            EnvStep(
                observation=_parse_observation(returned.observations[i]),
                rewards=self._name_rewards(rewards[i]),
                done=bool(terminated[i]),
                state=dict(states[i])
                if returned.metadata[i] is None and not terminated[i]
                else returned.metadata[i] or {},
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
            return await contain_exit(function(*args), self._user_code)
        return await self._blocking_calls.run(partial(function, *args))

    def _name_rewards(self, reward: float | list[float] | dict[str, float]) -> dict[str, float]:
        if isinstance(reward, dict):
            return {name: float(component) for name, component in reward.items()}
        if isinstance(reward, list):
            return {f"reward{i}": float(component) for i, component in enumerate(reward, start=1)}
        return {self._name: float(reward)}


def _to_list(values: Any) -> list[Any]:
    """Return a tensor, an array or a sequence as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _rows_of(rewards: Any) -> list[Any]:
    """Return the rewards of each item; those of a dict, [B] by name, as a dict each."""
    if not isinstance(rewards, Mapping):
        return _to_list(rewards)
    columns = {str(name): _to_list(values) for name, values in rewards.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _to_metadata(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as NeMo-RL's processors make it, whose name for a row's answer is `ground_truth`."""
    return {"ground_truth": state["answer"], **state} if "answer" in state else dict(state)


def _parse_observation(message: Mapping[str, Any] | None) -> tuple[Message, ...]:
    if not message or not message.get("content"):
        return ()
    role, content = ROLES.get(message["role"], "user"), message["content"]
    if not isinstance(content, list):
        return (Message(role, str(content)),)
    try:
        return (parse_message({"role": role, "content": content}, "observation"),)
    except DataError as error:
        raise EnvironmentContractError(str(error)) from error


def unwrap_actor_class(actor_class: Any) -> type:
    """Return the class that `@ray.remote` decorates."""
    return actor_class.__ray_metadata__.modified_class.__ray_actor_class__


def env_vars_of(actor_class: Any) -> dict[str, str]:
    """Return the environment variables of the `runtime_env` that `@ray.remote` was given."""
    runtime_env = (getattr(actor_class, "_default_options", None) or {}).get("runtime_env") or {}
    return dict(runtime_env.get("env_vars") or {})
