"""The boundary between rollouts and environments, built-in and the user's: deadlines, checks, classes of failures.

Gives every call of an environment its deadline, checks its results, and turns its faults into typed Failures. Rollouts
call `CheckedEnvironment`; a `Batcher` joins the items of many rollouts into few calls.
"""

import asyncio
import inspect
import re
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from nemo_rl.config.environment import BatchingConfig, CallRetriesConfig
from nemo_rl.environments.batcher import Batcher
from nemo_rl.environments.call_retries import CallRetries
from nemo_rl.environments.states import copy_or_none, copy_state
from nemo_rl.environments.user_code import contain_exit, gather_apart, name_user_code
from nemo_rl.errors import EnvironmentContractError, summarize_error
from nemo_rl.interfaces import Environment
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

ResultT = TypeVar("ResultT")
StepResult: TypeAlias = EnvStep | Failure
Item: TypeAlias = tuple[Sequence[Message], Any]  # a conversation and its state, a mapping

RESPONSE_TRUNCATED = "response_truncated"  # set in the state of every call if the token limit cut the last response
MAX_CALLS_ALONE = 32  # concurrent calls for single items of calls that raised, if `batching.max_calls` is not set
MAX_IMAGES = 16  # per observation; each is checked before it is decoded (data/vision.py)
RESPONSE_FAULT = re.compile("[a-z_]{1,64}")  # a response fault is part of a metric's name


class CheckedEnvironment:
    """An environment as rollouts call it: `step` raises nothing but cancellation, and its results are valid.

    A call that takes longer than `timeout_s` or gives a wrong number of results fails all of its items; an invalid
    result fails its own item. With `retries`, a call that raises is made again for each of its items alone. With
    `batching`, the items of concurrent `step` calls share calls of the inner environment; deadline and checks are then
    those of each shared call.
    """

    def __init__(
        self,
        inner: Environment,
        timeout_s: float | None,
        batching: BatchingConfig | None = None,
        retries: CallRetriesConfig | None = None,
    ) -> None:
        self._inner = inner
        self._user_code = name_user_code(inner)
        self._timeout_s = timeout_s
        self._retries = CallRetries.of(retries, 0, timeout_s, self._user_code)
        self._alone = asyncio.Semaphore((batching and batching.max_calls) or MAX_CALLS_ALONE)
        self._batcher: Batcher[Item, StepResult] | None = None
        if batching is not None:
            self._batcher = Batcher(self._call, batching)

    @property
    def bounds_items(self) -> bool:
        """Return whether each item has a deadline of its own, so that items need not share a call."""
        return self._timeout_s is None

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        """Return one result per item, in order."""
        items = list(zip(conversations, states, strict=True))
        return await (self._call(items) if self._batcher is None else self._batcher.submit(items))

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
        await close_user_environment(self._inner)

    async def _call(self, items: Sequence[Item]) -> Sequence[StepResult]:
        started_s = asyncio.get_running_loop().time()
        before = [None if self._retries is None else copy_or_none(state) for _, state in items]
        try:
            return await self._step(items)
        except (Exception, asyncio.CancelledError) as error:  # the boundary to code of others  # noqa: BLE001
            reraise_own_cancellation(error)
            if self._retries is None or not isinstance(error, Exception):
                return [error_to_failure(error)] * len(items)
            is_shared, as_before = len(items) > 1, [(c, state) for (c, _), state in zip(items, before, strict=True)]
            return await gather_apart(self._repeat(item, error, started_s, is_shared=is_shared) for item in as_before)

    async def _step(self, items: Sequence[Item]) -> Sequence[StepResult]:
        """Return the results of one call; raises what it raises, and TimeoutError at its deadline."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                results = await contain_exit(
                    self._inner.step([c for c, _ in items], [s for _, s in items]), self._user_code
                )
        except (Exception, asyncio.CancelledError) as error:
            reraise_own_cancellation(error)
            if deadline.expired():
                raise TimeoutError(f"no answer in {self._timeout_s:g} s") from None
            raise
        if len(results) != len(items):
            raise EnvironmentContractError(f"{len(results)} results for {len(items)} items")
        return [validate_result(result) for result in results]

    async def _repeat(self, item: Item, error: Exception, started_s: float, *, is_shared: bool) -> StepResult:
        """Return the result of an item of a call that raised `error`; what it raises alone is its failure.

        The item has its state as it was before the call, or None if that could not be copied.
        """
        conversation, state = item
        if self._retries is None or state is None:
            return error_to_failure(error)

        async def step_alone() -> StepResult:
            async with self._alone:
                return (await self._step([(conversation, copy_state(state))]))[0]

        try:
            return await self._retries.repeat(step_alone, error, started_s=started_s, pauses_first=not is_shared)
        except (Exception, asyncio.CancelledError) as last:  # the boundary to code of others  # noqa: BLE001
            reraise_own_cancellation(last)
            return error_to_failure(last)


async def close_user_environment(environment: Any) -> None:
    """Await the environment's `close`; a user's class need not have one."""
    if (close := getattr(environment, "close", None)) is not None:
        await close()


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
    if (count := sum(len(message.images) for message in result.observation)) > MAX_IMAGES:
        return _contract_failure(f"the observation of an EnvStep holds {count} images, more than {MAX_IMAGES}")
    if problem := find_fault_problem(result.response_fault):
        return _contract_failure(problem)
    if not _are_policy_rewards(result.policy_rewards):
        return _contract_failure("policy_rewards of an EnvStep must be mappings of rewards, by policy")
    all_rewards = (result.rewards, *result.policy_rewards.values())
    if problem := next(filter(None, map(find_reward_problem, all_rewards)), None):
        return Failure(FailureClass.REWARD, problem)
    return result


def _are_policy_rewards(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(rewards, Mapping) for rewards in value.values())


def find_fault_problem(fault: object) -> str | None:
    """Return how a response fault breaks its contract, or None."""
    if fault is None or (isinstance(fault, str) and RESPONSE_FAULT.fullmatch(fault)):
        return None
    return f"response_fault is {fault!r:.80}, not None or a name of at most 64 letters a to z and underscores"


def find_reward_problem(rewards: Mapping[str, object]) -> str | None:
    """Return which reward is not a finite number, or None."""
    for name, reward in rewards.items():
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
            return f"reward {name!r} is {reward!r:.80}, not a finite number"
    return None


def error_to_failure(
    error: BaseException, failure_class: FailureClass = FailureClass.ENVIRONMENT, *, prefix: str = ""
) -> Failure:
    """Return the Failure of an exception: its first line, and the traceback that experience/failure_limits.py logs.

    `prefix` says what failed if the exception alone does not.
    """
    frames = traceback.extract_tb(error.__traceback__)
    origin = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = "".join(traceback.format_exception(error)) if frames else ""
    cause = f"{prefix}: {summarize_error(error)}" if prefix else summarize_error(error)
    return Failure(failure_class, cause, origin, text)


async def step_each(
    step_one: Callable[[Sequence[Message], Mapping[str, Any]], Awaitable[StepResult]],
    conversations: Sequence[Sequence[Message]],
    states: Sequence[Mapping[str, Any]],
    failure_class: FailureClass = FailureClass.ENVIRONMENT,
    retries: CallRetries | None = None,
) -> list[StepResult]:
    """Return the result of `step_one` for each item on its own: what it raises is the failure of its item alone.

    A single item runs in the caller's task, several in a task each. With `retries` a call that raises is made again.
    """

    async def guarded(conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        def step(given: Mapping[str, Any]) -> Awaitable[StepResult]:
            return contain_exit(step_one(conversation, given))

        try:
            return await (step(state) if retries is None else retries.call(step, state))
        except Exception as error:  # the item's own content: deep JSON, a state without its keys, a worker's death  # noqa: BLE001
            return error_to_failure(error, failure_class)

    if len(conversations) == len(states) == 1:  # without a task, which costs more than the rest of this
        return [await guarded(conversations[0], states[0])]
    items = zip(conversations, states, strict=True)
    return await gather_apart(guarded(conversation, state) for conversation, state in items)


def reraise_own_cancellation(error: BaseException) -> None:
    """Raise `error` again if it is the cancellation of the current task.

    A CancelledError from within is a fault of the code that is called.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


def is_async_callable(function: Callable[..., Any]) -> bool:
    """Return whether a call gives an awaitable: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not whether it is callable
    )


def _contract_failure(problem: str) -> Failure:
    return error_to_failure(EnvironmentContractError(problem))
