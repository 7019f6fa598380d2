"""The environment boundary: blocking calls off the event loop, and the contract that every call of `step` satisfies."""

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from nemo_rl.errors import EnvironmentContractError, summarize_error
from nemo_rl.interfaces import Environment
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

ResultT = TypeVar("ResultT")


class BlockingCalls:
    """At most `max_concurrency` blocking calls; more wait for room.

    Each has a daemon thread of its own (some 50 µs), unlike an executor's, which the interpreter joins at its end. A
    call that is cancelled or out of time leaves its thread behind, which no one can stop, and gives its room free.
    """

    def __init__(self, name: str, max_concurrency: int) -> None:
        self._name = name
        self._semaphore = asyncio.Semaphore(max_concurrency)

    async def run(self, function: Callable[[], ResultT], *, timeout_s: float | None = None) -> ResultT:
        """The function's result or exception; TimeoutError `timeout_s` after it began."""
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
    """Whether a call gives an awaitable: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not whether it is callable
    )


def _run_into_future(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


logger = logging.getLogger(__name__)
RESPONSE_TRUNCATED = "response_truncated"
StepResult: TypeAlias = EnvStep | Failure


def error_to_failure(error: BaseException, failure_class: FailureClass = FailureClass.ENVIRONMENT) -> Failure:
    """The error as one line."""
    return Failure(failure_class, summarize_error(error))


def reraise_own_cancellation(error: BaseException) -> None:
    """Raise `error` again where it is the cancellation of the current task; one from within is a fault of the code
    that is called."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def validate_result(result: object) -> StepResult:
    """The result itself, or a failure where it is no result or a reward is no finite number."""
    if isinstance(result, Failure):
        return result
    if not isinstance(result, EnvStep):
        return error_to_failure(
            EnvironmentContractError(f"a step gave {type(result).__name__}, not EnvStep or Failure")
        )
    for name, reward in result.rewards.items():
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            return Failure(FailureClass.REWARD, f"reward {name!r} is {reward!r}, not a finite number")
    return result


async def step_with_checks(
    environment: Environment,
    conversations: Sequence[Sequence[Message]],
    states: Sequence[Mapping[str, Any]],
    *,
    timeout_s: float | None,
) -> tuple[StepResult, ...]:
    """One result an item, in order, whatever the environment does; raises nothing but cancellation."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            results = await environment.step(conversations, states)
        if len(results) != len(conversations):
            raise EnvironmentContractError(f"{len(results)} results for {len(conversations)} items")
        return tuple(validate_result(result) for result in results)
    except (Exception, asyncio.CancelledError) as error:  # the boundary to code of others
        reraise_own_cancellation(error)
        cause = TimeoutError(f"no answer in {timeout_s:g} s") if deadline.expired() else error
        logger.warning("an environment failed %d items", len(conversations), exc_info=cause)
        return (error_to_failure(cause),) * len(conversations)


class CheckedEnvironment:
    """Any environment with a deadline on its calls and its results checked; `step` raises nothing."""

    def __init__(self, inner: Environment, timeout_s: float | None) -> None:
        self._inner = inner
        self._timeout_s = timeout_s

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        return await step_with_checks(self._inner, conversations, states, timeout_s=self._timeout_s)

    async def close(self) -> None:
        await self._inner.close()
