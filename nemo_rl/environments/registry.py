"""Environments of the entries of `env`, and the adapter of the kind for a user's own classes and functions."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl.config.environment import (
    BatchingConfig,
    CallRetriesConfig,
    CustomEnvironmentConfig,
    EnvironmentConfig,
)
from nemo_rl.config.kinds import Entry, load_optional
from nemo_rl.config.registries import ENVIRONMENT_ADAPTERS, ENVIRONMENTS
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import (
    CheckedEnvironment,
    StepResult,
    close_user_environment,
    error_to_failure,
    is_async_callable,
    step_each,
)
from nemo_rl.environments.call_retries import CallRetries
from nemo_rl.environments.process_pool import MEMORY_BYTES, PoolOptions, ProcessPool
from nemo_rl.environments.step_records import parse_step, step_to_record
from nemo_rl.environments.user_code import contain_exit, name_user_code
from nemo_rl.errors import ConfigError, EnvironmentContractError, WorkerError
from nemo_rl.interfaces import Environment
from nemo_rl.types import EnvStep, FailureClass, Message

if TYPE_CHECKING:
    from nemo_rl.distributed.actors import ActorHandle

MAX_RETRIES_OF_ONE = 2  # retries of a function, or a step of one conversation, unless `retries.max_retries` is set
MAX_RESTARTS = 3  # per actor
CLOSE_TIMEOUT_S = 30.0
MAX_FUNCTION_THREADS = 32  # concurrent calls of a function that is not async


def make_environment(name: str, section: EnvironmentConfig) -> CheckedEnvironment:
    """Return the environment of the entry `env.<name>`: calls bounded by `timeout_s`, batched or remote as configured.

    `section.type` (None: `name`) is a built-in or registered name, or the dotted path of an `Entry`, or of what
    `adapt_environment` makes an entry of. Raises ConfigError for a name or path that is not found and for a class that
    cannot be constructed.
    """
    is_isolated = section.isolated or section.sandboxed
    if is_isolated and section.remote.enabled:
        key = f"env.{name}.{'isolated' if section.isolated else 'sandboxed'}"
        raise ConfigError(key, True, "an environment in Ray actors (remote.enabled) has processes of its own already")
    if is_isolated:
        inner: Environment = IsolatedEnvironment(name, section)
    elif section.remote.enabled:
        inner = RemoteEnvironment(name, section)
    else:
        return make_environment_here(name, section)
    return _check_calls(inner, section, retries=None)  # their copies of the environment make calls again


def make_environment_here(name: str, section: EnvironmentConfig) -> CheckedEnvironment:
    """Return the environment in this process, whether or not it is isolated or remote for others."""
    inner = ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type").make(name, section)
    return _check_calls(inner, section, retries=getattr(section, "retries", None))


def _check_calls(
    inner: Environment, section: EnvironmentConfig, retries: CallRetriesConfig | None
) -> CheckedEnvironment:
    timeout_s = None if getattr(inner, "bounds_items", False) else section.timeout_s
    batching = section.batching if section.batching.enabled else None
    return CheckedEnvironment(inner, timeout_s, batching, retries)


def adapt_environment(key: str, path: str, target: Any) -> Entry[CustomEnvironmentConfig]:
    """Return the entry for a user's class or function; raises ConfigError for `key` for anything else.

    `target` is one of

    - a class with `async step(conversation, state)`, the answer of one conversation as an EnvStep or Failure;
    - a class with `async step(conversations, states)`: interfaces.Environment;
    - a class that one of ENVIRONMENT_ADAPTERS knows, such as an environment written for NeMo-RL;
    - a function `(messages, metadata) -> float | dict[str, float]`, async or not: the reward of a whole conversation,
      a list of {"role", "content"}, given the prompt's env_state.

    Classes are constructed with `section.kwargs`; `async close()` is called at the end if they have it.
    """
    for adapt in load_optional(ENVIRONMENT_ADAPTERS):
        if (entry := adapt(key, path, target)) is not None:
            return entry
    if inspect.isclass(target):
        _check_methods(key, path, target)
        return Entry(
            CustomEnvironmentConfig, make=lambda name, section: _make_class_environment(key, path, target, section)
        )
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

    A number becomes the reward `{name: number}`, a dict the rewards of its names. A call longer than `timeout_s`, or
    one that raises as often as `retries` allow, fails the item that it was made for. Functions that are not async run
    in threads, except in the sandbox, which has none.
    """

    bounds_items = True

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        timeout_s: float,
        retries: CallRetriesConfig | None = None,
        has_threads: bool = True,
    ) -> None:
        self._name = name
        self._has_threads = has_threads
        self._timeout_s = timeout_s
        self._function = function
        self._is_async = is_async_callable(function)
        self._user_code = name_user_code(function)
        self._retries = CallRetries.of(retries, MAX_RETRIES_OF_ONE, timeout_s, self._user_code)
        self._blocking_calls = BlockingCalls(f"env-{name}", MAX_FUNCTION_THREADS, user_code=self._user_code)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._score, conversations, states, FailureClass.REWARD, self._retries)

    async def _score(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        call = partial(self._function, messages_to_dicts(conversation), dict(state))
        if self._is_async:
            async with asyncio.timeout(self._timeout_s):
                score = await contain_exit(call(), self._user_code)
        elif self._has_threads:
            score = await self._blocking_calls.run(call, timeout_s=self._timeout_s)
        else:
            score = call()
        scores = score if isinstance(score, Mapping) else {self._name: score}
        return EnvStep(rewards={str(name): float(value) for name, value in scores.items()}, state=state)

    async def close(self) -> None:
        """Do nothing: no resources are held."""


class OneByOneEnvironment:
    """A user's class whose `step` answers one conversation: its calls overlap, and each has `timeout_s`."""

    bounds_items = True

    def __init__(self, inner: Any, *, timeout_s: float, retries: CallRetriesConfig) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._user_code = name_user_code(inner)
        self._retries = CallRetries.of(retries, MAX_RETRIES_OF_ONE, timeout_s, self._user_code)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._step_one, conversations, states, retries=self._retries)

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        async with asyncio.timeout(self._timeout_s):
            return await contain_exit(self._inner.step(conversation, state), self._user_code)

    async def close(self) -> None:
        await close_user_environment(self._inner)


class IsolatedEnvironment:
    """Copies of one environment in processes of their own, one item per call: user code that blocks or crashes.

    A process that dies, or has not answered after `timeout_s`, fails its item alone and is replaced. States that a step
    returns are JSON. With `sandboxed` the processes can do nothing but compute: no files, no network, no variables of
    the trainer, no process or thread.
    """

    bounds_items = True

    def __init__(self, name: str, section: EnvironmentConfig) -> None:
        ENVIRONMENTS.entry(section.type or name, key=f"env.{name}.type")  # an unknown name is refused here
        # The process is killed at the deadline; the environment's own deadline comes later.
        own = section.model_copy(
            update={"timeout_s": section.timeout_s + CLOSE_TIMEOUT_S, "batching": BatchingConfig()}
        )
        self._pool = ProcessPool(
            f"{__name__}:{make_step.__name__}",
            section.isolated_workers,
            PoolOptions(
                section.timeout_s,
                memory_bytes=MEMORY_BYTES if section.sandboxed else None,
                sandboxed=section.sandboxed,
            ),
            factory_args=(name, own),  # imports of the user's code are no part of an item's time
        )

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_each(self._step_one, conversations, states)

    async def _step_one(self, conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        return parse_step(await self._pool.call(list(conversation), dict(state)))

    async def close(self) -> None:
        await self._pool.close()


def make_step(name: str, section: EnvironmentConfig) -> Callable[..., dict[str, Any]]:
    """Return the step of one item as records, for a process of its own."""
    runner, environment = asyncio.Runner(), make_environment_here(name, section)

    def step(conversation: Sequence[Message], state: Mapping[str, Any]) -> dict[str, Any]:
        (result,) = runner.run(environment.step([conversation], [state]))
        return step_to_record(result)

    return step


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
                section.model_copy(update={"batching": BatchingConfig()}),  # batched outside
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
    def __init__(self, name: str, section: EnvironmentConfig) -> None:
        self._environment = make_environment_here(name, section)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await self._environment.step(conversations, states)

    async def close(self) -> None:
        await self._environment.close()


def _make_function_environment(
    name: str, function: Callable[..., Any], section: CustomEnvironmentConfig
) -> FunctionEnvironment:
    _check_no_kwargs(f"env.{name}", section)
    return FunctionEnvironment(
        name, function, timeout_s=section.timeout_s, retries=section.retries, has_threads=not section.sandboxed
    )


def _check_no_kwargs(key: str, section: CustomEnvironmentConfig, config: object = None) -> None:
    if section.kwargs:
        raise ConfigError(f"{key}.kwargs", section.kwargs, "a function takes none; they are for classes")


def _check_methods(key: str, path: str, target: type) -> None:
    """Raise ConfigError for a class that is no environment, as far as can be told without calling it."""
    if getattr(target, "step", None) is None:
        raise ConfigError(key, path, "the class has no method `step`")
    for method in ("step", "close"):
        found = getattr(target, method, None)
        if found is not None and not inspect.iscoroutinefunction(found):
            raise ConfigError(key, path, f"the class's method `{method}` must be `async def`")


def _make_class_environment(key: str, path: str, target: type, section: CustomEnvironmentConfig) -> Environment:
    inner = _construct(key, path, target, section.kwargs)
    if "conversation" in inspect.signature(target.step).parameters:
        return OneByOneEnvironment(inner, timeout_s=section.timeout_s, retries=section.retries)
    return inner


def _construct(key: str, path: str, target: type[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return target(**kwargs)
    except (Exception, SystemExit) as error:  # a user's own constructor
        problem = f"cannot be constructed with kwargs {kwargs!r}: {type(error).__name__}: {error}"
        raise ConfigError(key, path, problem) from error
