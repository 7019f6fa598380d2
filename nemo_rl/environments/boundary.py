"""The boundary between rollouts and environments, built-in and the user's: deadlines, checks, classes of failures.

The one place where a call of an environment gets its deadline, its results are checked and its faults become typed
Failures. Rollouts call `CheckedEnvironment`; a `Batcher` joins the items of many rollouts into few calls.
"""

import asyncio
import inspect
import math
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.errors import EnvironmentContractError, UserExitError, summarize_error
from nemo_rl.interfaces import Environment
from nemo_rl.types import EnvStep, Failure, FailureClass, Message

ItemT = TypeVar("ItemT")
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
                results = await contain_exit(self._inner.step([c for c, _ in items], [s for _, s in items]))
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
    """Return the Failure of an exception: its first line, and the traceback that experience/supervision.py logs.

    `prefix` says what failed, where the exception alone does not.
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
) -> list[StepResult]:
    """Return the result of `step_one` for each item on its own: what it raises is the failure of its item alone.

    A single item runs in the caller's task, several in a task each. User code that cancels its current task therefore
    cancels the caller in the first case, as in an `Environment.step` of its own, and fails its item in the second.
    """

    async def guarded(conversation: Sequence[Message], state: Mapping[str, Any]) -> StepResult:
        try:
            return await contain_exit(step_one(conversation, state))
        except Exception as error:  # the item's own content: deep JSON, a state without its keys, a worker's death
            return error_to_failure(error, failure_class)

    if len(conversations) == len(states) == 1:  # without a task, which costs more than the rest of this
        return [await guarded(conversations[0], states[0])]
    items = zip(conversations, states, strict=True)
    return list(await asyncio.gather(*(guarded(conversation, state) for conversation, state in items)))


async def contain_exit(work: Awaitable[ResultT]) -> ResultT:
    """Return the result of user code; its `sys.exit` or KeyboardInterrupt is raised as a UserExitError.

    As such they would end the event loop, and the run with it, in whatever task they are raised. A real Ctrl-C passes:
    it reaches a task as a cancellation, or as the interrupt of asyncio's or Python's own signal handler.
    """
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and _is_from_signal(error):
            raise
        raise UserExitError(describe_exit(error)) from error


def describe_exit(error: BaseException) -> str:
    """Return what an exception that is no Exception would have ended, for a failure's cause."""
    return f"user code raised {type(error).__name__}({', '.join(map(repr, error.args))}), which ends no run"


def _is_from_signal(error: KeyboardInterrupt) -> bool:
    """Return whether a handler of SIGINT raised it: asyncio's is its last frame, Python's own leaves none."""
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or frames[-1].name == "_on_sigint" or "raise KeyboardInterrupt" not in (frames[-1].line or "")


def reraise_own_cancellation(error: BaseException) -> None:
    """Raise `error` again if it is the cancellation of the current task.

    A CancelledError from within is a fault of the code that is called.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


@dataclass(frozen=True, slots=True)
class _PendingItem(Generic[ItemT, ResultT]):
    item: ItemT
    result: asyncio.Future[ResultT]
    arrived_s: float  # on the loop's clock


class Batcher(Generic[ItemT, ResultT]):
    """A queue whose items, from concurrent `submit` calls, share calls of `process`: one result per item, in order.

    A call begins when `max_batch_size` items are queued, or `max_wait_ms` after the oldest one arrived, whatever their
    number; at most `max_calls` run concurrently, and items that arrive meanwhile are batched. At most `max_queue_size`
    items are queued; further callers wait for room. An exception of `process` is raised to the callers of its own items
    and no others; deadlines are its own affair. Queued items of a cancelled caller are dropped. `close` first processes
    the queue.

    Consumes: items of `submit`. Produces: their results, through futures. The flushing task waits for a first item,
    then for a full batch or the deadline; both are signalled by `_changed`, as is room in the queue.
    """

    def __init__(
        self, process: Callable[[list[ItemT]], Awaitable[Sequence[ResultT]]], batching: BatchingConfig
    ) -> None:
        self.num_calls = 0  # of `process`
        self.num_items = 0  # in those calls
        self._process = process
        self._batching = batching
        self._queue: deque[_PendingItem[ItemT, ResultT]] = deque()
        self._changed = asyncio.Condition()
        self._flusher: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False

    async def submit(self, items: Sequence[ItemT]) -> list[ResultT]:
        """Return one result per item, in order; raises EnvironmentContractError once closed."""
        loop = asyncio.get_running_loop()
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_forever())
        results: list[asyncio.Future[ResultT]] = []
        try:
            for item in items:
                result: asyncio.Future[ResultT] = loop.create_future()
                results.append(result)
                await self._put(_PendingItem(item, result, loop.time()))
            return [await result for result in results]
        finally:
            for result in results:
                if not result.cancel() and not result.cancelled():
                    result.exception()  # retrieved: another item of this call was the first to raise

    async def close(self) -> None:
        """Process the queued items; items submitted later are refused."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._flusher is not None:
            await self._flusher
        await asyncio.gather(*self._calls)

    async def _put(self, pending: _PendingItem[ItemT, ResultT]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._queue) < self._batching.max_queue_size)
            if self._closed:
                raise EnvironmentContractError("the environment is closed")
            self._queue.append(pending)
            self._changed.notify_all()

    async def _flush_forever(self) -> None:
        while batch := await self._next_batch():
            self._calls.add(asyncio.create_task(self._call(batch)))

    async def _next_batch(self) -> list[_PendingItem[ItemT, ResultT]]:
        """Return the items of the next call; an empty list once closed and drained."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._closed or self._queue)
                await self._wait_for_more()
                await self._changed.wait_for(self._may_call)
                size = min(len(self._queue), self._batching.max_batch_size)
                batch = [self._queue.popleft() for _ in range(size)]
                self._changed.notify_all()
            batch = [pending for pending in batch if not pending.result.done()]
            if batch or (self._closed and not self._queue):
                return batch

    def _may_call(self) -> bool:
        return self._batching.max_calls is None or len(self._calls) < self._batching.max_calls

    async def _wait_for_more(self) -> None:
        """Wait until a full batch is queued, the oldest item has waited long enough, or the queue is full."""
        enough = min(self._batching.max_batch_size, self._batching.max_queue_size)
        if self._closed or len(self._queue) >= enough:
            return
        deadline_s = self._queue[0].arrived_s + self._batching.max_wait_ms / 1000
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._changed.wait_for(lambda: self._closed or len(self._queue) >= enough)
        except TimeoutError:
            return

    async def _call(self, batch: list[_PendingItem[ItemT, ResultT]]) -> None:
        try:
            await self._resolve(batch)
        finally:
            async with self._changed:
                self._calls.discard(asyncio.current_task())  # type: ignore[arg-type]
                self._changed.notify_all()

    async def _resolve(self, batch: list[_PendingItem[ItemT, ResultT]]) -> None:
        self.num_calls += 1
        self.num_items += len(batch)
        try:
            results = await self._process([pending.item for pending in batch])
            if len(results) != len(batch):
                raise EnvironmentContractError(f"{len(results)} results for {len(batch)} items")
        except Exception as error:  # raised to the callers that wait for it
            for pending in batch:
                if not pending.result.done():
                    pending.result.set_exception(error)
            return
        for pending, result in zip(batch, results, strict=True):
            if not pending.result.done():
                pending.result.set_result(result)


def is_async_callable(function: Callable[..., Any]) -> bool:
    """Return whether a call gives an awaitable: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not whether it is callable
    )


def _contract_failure(problem: str) -> Failure:
    return error_to_failure(EnvironmentContractError(problem))
