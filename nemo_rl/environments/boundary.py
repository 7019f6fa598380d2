"""The boundary between rollouts and environments, both built-in and the user's.

The one place where a call of an environment gets its deadline, its results are checked and its faults become typed
Failures. Rollouts call `CheckedEnvironment`; environments use `BlockingCalls` to keep blocking work off the event loop.
"""

import asyncio
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.environments.batcher import Batcher
from nemo_rl.errors import EnvironmentContractError, summarize_error
from nemo_rl.interfaces import Environment
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
StepResult: TypeAlias = EnvStep | Failure
Item: TypeAlias = tuple[Sequence[Message], Mapping[str, Any]]  # a conversation and its state

RESPONSE_TRUNCATED = "response_truncated"  # in the state of every call: the token limit cut the last response


class CheckedEnvironment:
    """An environment as rollouts call it: `step` raises nothing but cancellation, and its results are valid.

    A call that takes longer than `timeout_s`, raises or gives a wrong number of results fails all of its items; an
    invalid result fails its own item. With `batching`, the items of concurrent `step` calls share calls of the inner
    environment; deadline and checks are then those of each shared call.
    """

    def __init__(self, inner: Environment, timeout_s: float | None, batching: BatchingConfig | None = None) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._batcher: Batcher[Item, StepResult] | None = None
        if batching is not None:
            self._batcher = Batcher(self._call, batching)

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        """Return one result per item, in order."""
        items = list(zip(conversations, states, strict=True))
        return await (self._call(items) if self._batcher is None else self._batcher.submit(items))

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
        await self._inner.close()

    async def _call(self, items: Sequence[Item]) -> Sequence[StepResult]:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                results = await self._inner.step([conversation for conversation, _ in items], [s for _, s in items])
            if len(results) != len(items):
                raise EnvironmentContractError(f"{len(results)} results for {len(items)} items")
            return [validate_result(result) for result in results]
        except (Exception, asyncio.CancelledError) as error:  # the boundary to code of others
            reraise_own_cancellation(error)
            expired = deadline.expired()
            cause = TimeoutError(f"no answer in {self._timeout_s:g} s") if expired else error
            return [error_to_failure(cause)] * len(items)


def validate_result(result: object) -> StepResult:
    """Return the result, or a Failure that says how it breaks the contract of `Environment.step`."""
    if isinstance(result, Failure):
        return result
    if not isinstance(result, EnvStep):
        return _contract_failure(f"a step gave {type(result).__name__}, not EnvStep or Failure")
    if not isinstance(result.rewards, Mapping) or not isinstance(result.state, Mapping):
        return _contract_failure("rewards and state of an EnvStep must be mappings")
    if not all(isinstance(message, Message) for message in result.observation):
        return _contract_failure("the observation of an EnvStep must hold Messages")
    if problem := find_reward_problem(result.rewards):
        return Failure(FailureClass.REWARD, problem)
    return result


def find_reward_problem(rewards: Mapping[str, object]) -> str | None:
    """Return which reward is not a finite number, or None."""
    for name, reward in rewards.items():
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            return f"reward {name!r} is {reward!r}, not a finite number"
    return None


def error_to_failure(
    error: BaseException, failure_class: FailureClass = FailureClass.ENVIRONMENT, *, prefix: str = ""
) -> Failure:
    """Return the Failure of an exception: its first line, and the traceback that experience/failures.py logs.

    `prefix` says what failed, where the exception alone does not.
    """
    frames = traceback.extract_tb(error.__traceback__)
    origin = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = "".join(traceback.format_exception(error)) if frames else ""
    cause = f"{prefix}: {summarize_error(error)}" if prefix else summarize_error(error)
    return Failure(failure_class, cause, origin, text)


def reraise_own_cancellation(error: BaseException) -> None:
    """Raise `error` again if it is the cancellation of the current task.

    A CancelledError from within is a fault of the code that is called.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


class BlockingCalls:
    """At most `max_concurrency` blocking calls at once; further calls wait.

    Each runs in a daemon thread of its own (some 50 µs), which unlike an executor's is not joined when the interpreter
    exits. A call that is cancelled or times out leaves its thread running, since a thread cannot be stopped, and frees
    its slot.
    """

    def __init__(self, name: str, max_concurrency: int) -> None:
        self._name = name
        self._semaphore = asyncio.Semaphore(max_concurrency)

    async def run(self, function: Callable[[], ResultT], *, timeout_s: float | None = None) -> ResultT:
        """Return the function's result or raise its exception; raise TimeoutError `timeout_s` after it began."""
        async with self._semaphore:
            future: Future[ResultT] = Future()
            threading.Thread(target=_run_into_future, args=(future, function), name=self._name, daemon=True).start()
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    return await asyncio.wrap_future(future)
            except TimeoutError as error:
                if deadline.expired():
                    raise TimeoutError(f"no answer in {timeout_s:g} s") from error
                raise


def is_async_callable(function: Callable[..., Any]) -> bool:
    """Return whether a call gives an awaitable: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not whether it is callable
    )


def _contract_failure(problem: str) -> Failure:
    return error_to_failure(EnvironmentContractError(problem))


def _run_into_future(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
