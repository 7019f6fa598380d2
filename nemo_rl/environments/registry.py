"""Environments of the entries of `env`, and the adapter of the kind for a user's own classes and functions."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl.config.environment import BatchingConfig, CustomEnvironmentConfig, EnvironmentConfig, RemoteConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.registries import ENVIRONMENTS
from nemo_rl.data.messages import parse_message
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import (
    CheckedEnvironment,
    StepResult,
    contain_exit,
    error_to_failure,
    is_async_callable,
    step_each,
)
from nemo_rl.environments.process_pool import ProcessPool
from nemo_rl.errors import ConfigError, DataError, EnvironmentContractError, WorkerError
from nemo_rl.interfaces import Environment
from nemo_rl.types import EnvStep, FailureClass, Message, Role

if TYPE_CHECKING:
    from nemo_rl.distributed.actors import ActorHandle

MAX_RESTARTS = 3  # of each actor
CLOSE_TIMEOUT_S = 30.0
MAX_FUNCTION_THREADS = 32  # concurrent calls of a function that is not async
ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


_made_in_this_process: dict[str, tuple[asyncio.Runner, CheckedEnvironment]] = {}  # of a worker of IsolatedEnvironment


def make_environment(name: str, section: EnvironmentConfig) -> CheckedEnvironment:
    """Return the environment of the entry `env.<name>`: calls bounded by `timeout_s`, batched or remote as configured.

    `section.type` (None: `name`) is a built-in or registered name, or the dotted path of an `Entry`, or of what
    `adapt_environment` makes an entry of. Raises ConfigError for a name or path that is not found and for a class that
    cannot be constructed.
    """
    if section.isolated and section.remote.enabled:
        raise ConfigError(
            f"env.{name}.isolated", True, "an environment in Ray actors (remote.enabled) is isolated already"
        )
    if section.isolated:
        inner: Environment = IsolatedEnvironment(name, section)
    elif section.remote.enabled:
        inner = RemoteEnvironment(name, section)
    else:
        inner = ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type").make(name, section)
    bounds_items = isinstance(inner, FunctionEnvironment | IsolatedEnvironment)  # each item has its own deadline
    timeout_s = None if bounds_items else section.timeout_s
    return CheckedEnvironment(inner, timeout_s, section.batching if section.batching.enabled else None)


def strip_wrappers(section: EnvironmentConfig) -> EnvironmentConfig:
    """Return the section as it is in another process: neither remote nor isolated again, and batched outside."""
    return section.model_copy(update={"remote": RemoteConfig(), "isolated": False, "batching": BatchingConfig()})


def adapt_environment(key: str, path: str, target: Any) -> Entry[CustomEnvironmentConfig]:
    """Return the entry for a user's class or function; raises ConfigError for `key` for anything else.

    `target` is one of

    - a class with `async step(conversations, states)` and `async close()`: interfaces.Environment;
    - a NeMo-RL environment class, `step(message_log_batch, metadata) -> EnvironmentReturn`, `@ray.remote` or not;
    - a function `(messages, metadata) -> float | dict[str, float]`, async or not: the reward of a whole conversation,
      a list of {"role", "content"}, given the prompt's env_state.

    Classes are constructed with `section.kwargs`.
    """
    if is_nemo_rl_environment(target):
        return Entry(
            CustomEnvironmentConfig, make=lambda name, section: NemoRLEnvironment(name, target, section.kwargs)
        )
    if inspect.isclass(target):
        _check_methods(key, path, target)
        return Entry(CustomEnvironmentConfig, make=lambda name, section: _construct(key, path, target, section.kwargs))
    if not callable(target):
        raise ConfigError(key, path, "neither a class nor a function")
    return Entry(
        CustomEnvironmentConfig,
        make=lambda name, section: _make_function_environment(name, target, section),
        check=_check_no_kwargs,
    )


def messages_to_dicts(conversation: Sequence[Message]) -> list[dict[str, str]]:
    """Return new dicts of role and content: the form in which a user's code receives a conversation."""
    return [{"role": message.role, "content": message.content} for message in conversation]


class FunctionEnvironment:
    """A reward function of a whole conversation, as an environment of a single turn.

    A number becomes the reward `{name: number}`, a dict the rewards of its names. An exception, or a call longer than
    `timeout_s`, fails the item that it was called for. Functions that are not async run in threads.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._function = function
        self._is_async = is_async_callable(function)
        self._blocking_calls = BlockingCalls(f"env-{name}", MAX_FUNCTION_THREADS)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._score, conversations, states, FailureClass.REWARD)

    async def _score(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        call = partial(self._function, messages_to_dicts(conversation), dict(state))
        if self._is_async:
            score = await asyncio.wait_for(contain_exit(call()), self._timeout_s)
        else:
            score = await self._blocking_calls.run(call, timeout_s=self._timeout_s)
        scores = score if isinstance(score, Mapping) else {self._name: score}
        return EnvStep(rewards={str(name): float(value) for name, value in scores.items()}, state=state)

    async def close(self) -> None:
        """Do nothing: no resources are held."""


class NemoRLEnvironment:
    """A NeMo-RL environment: `step(message_log_batch, metadata) -> EnvironmentReturn`.

    A `ray.remote` class lives in an actor of its own, any other in a thread of this process, one call at a time. Its
    role "environment" becomes "user". Metadata None keeps a conversation's own until its end. Rewards of shape [B] get
    the entry's name, those of [B, R] the names reward1 to rewardR; of a dict each has its own.
    """

    def __init__(self, name: str, cls: Any, kwargs: Mapping[str, Any]) -> None:
        self._name = name
        self._blocking_calls = BlockingCalls(f"env-{name}", 1)
        self._actor = None
        self._inner: Any = None
        if is_ray_actor_class(cls):
            from nemo_rl.distributed.actors import env_vars_of, spawn_actor, unwrap_actor_class  # loads Ray

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
        returned = await self._call("step", message_logs, [dict(state) for state in states])
        rewards = _rows_of(returned.rewards)
        terminated = _to_list(returned.terminateds)
        count = len(conversations)
        columns = (returned.observations, returned.metadata, rewards, terminated)
        if any(len(column) != count for column in columns):
            raise EnvironmentContractError(f"{[len(column) for column in columns]} results for {count} items")
        stop_strings: Any = returned.next_stop_strings or [None] * count
        answers: Any = getattr(returned, "answers", None) or [None] * count  # older EnvironmentReturns have none
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
            return await contain_exit(function(*args))
        return await self._blocking_calls.run(partial(function, *args))

    def _name_rewards(self, reward: float | list[float] | dict[str, float]) -> dict[str, float]:
        if isinstance(reward, dict):
            return {name: float(component) for name, component in reward.items()}
        if isinstance(reward, list):
            return {f"reward{i}": float(component) for i, component in enumerate(reward, start=1)}
        return {self._name: float(reward)}


class IsolatedEnvironment:
    """Copies of one environment in processes of their own, one item per call: user code that blocks or crashes.

    A process that dies, or has not answered after `timeout_s`, fails its item alone and is replaced.
    """

    def __init__(self, name: str, section: EnvironmentConfig) -> None:
        ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type")  # an unknown name is refused here
        function = f"{__name__}:{step_in_process.__name__}"
        self._name = name
        # The process is killed at the deadline; the environment's own deadline comes later.
        self._section = strip_wrappers(section).model_copy(update={"timeout_s": section.timeout_s + CLOSE_TIMEOUT_S})
        self._pool = ProcessPool(
            function,
            section.isolated_workers,
            timeout_s=section.timeout_s,
            memory_bytes=None,
            setup=(name, self._section),  # what the user's code imports is no part of an item's time
        )

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._step_one, conversations, states)

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        return await self._pool.call(self._name, self._section, list(conversation), dict(state))

    async def close(self) -> None:
        await self._pool.close()


def step_in_process(
    name: str,
    section: EnvironmentConfig,
    conversation: Sequence[Message] | None = None,
    state: Mapping[str, Any] | None = None,
) -> StepResult | None:
    """Return the result of one item; without an item, only make the environment. Runs in a worker."""
    if name not in _made_in_this_process:
        _made_in_this_process[name] = asyncio.Runner(), make_environment(name, section)
    if conversation is None or state is None:
        return None
    runner, environment = _made_in_this_process[name]
    (result,) = runner.run(environment.step([conversation], [state]))
    return result


class RemoteEnvironment:
    """Copies of one environment in `num_actors` actors. A call is split, and each share goes to the least busy one.

    An actor that dies fails the items that it holds and is restarted, three times at most.
    """

    def __init__(self, name: str, section: EnvironmentConfig) -> None:
        from nemo_rl.distributed.actors import spawn_actor  # loads Ray
        from nemo_rl.distributed.load_balancer import LoadBalancer

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


async def _close_actor(actor: "ActorHandle") -> None:
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


def _to_list(values: Any) -> list[Any]:
    """Return a tensor, an array or a sequence as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _rows_of(rewards: Any) -> list[Any]:
    """Return the rewards of each item; those of a dict, [B] by name, as a dict each."""
    if not isinstance(rewards, Mapping):
        return _to_list(rewards)
    columns = {str(name): _to_list(values) for name, values in rewards.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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


def _make_function_environment(
    name: str, function: Callable[..., Any], section: CustomEnvironmentConfig
) -> FunctionEnvironment:
    _check_no_kwargs(f"env.{name}", section)
    return FunctionEnvironment(name, function, timeout_s=section.timeout_s)


def _check_no_kwargs(key: str, section: CustomEnvironmentConfig, config: object = None) -> None:
    if section.kwargs:
        raise ConfigError(f"{key}.kwargs", section.kwargs, "a function takes none; they are for classes")


def _check_methods(key: str, path: str, target: type) -> None:
    """Raise ConfigError for a class that is no interfaces.Environment, as far as can be told without calling it."""
    for method in ("step", "close"):
        found = getattr(target, method, None)
        if found is None:
            raise ConfigError(key, path, f"the class has no method `{method}`")
        if not inspect.iscoroutinefunction(found):
            raise ConfigError(key, path, f"the class's method `{method}` must be `async def`")


def _construct(key: str, path: str, target: type, kwargs: dict[str, Any]) -> Environment:
    try:
        return target(**kwargs)
    except (Exception, SystemExit) as error:  # a user's own constructor
        problem = f"cannot be constructed with kwargs {kwargs!r}: {type(error).__name__}: {error}"
        raise ConfigError(key, path, problem) from error
