"""A batcher: items of many concurrent callers share few calls."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.errors import EnvironmentContractError

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _PendingItem(Generic[ItemT, ResultT]):
    item: ItemT
    result: asyncio.Future[ResultT]
    arrived_s: float  # time of the loop's clock


class Batcher(Generic[ItemT, ResultT]):
    """A queue whose items, from concurrent `submit` calls, share calls of `process`: one result per item, in order.

    A call begins when `max_batch_size` items are queued, or `max_wait_ms` after the oldest one arrived, however few;
    at most `max_calls` run concurrently, and items that arrive meanwhile are batched. At most `max_queue_size` items
    are queued; further callers wait for room. An exception of `process` is raised to the callers of its own items and
    no others; `process` bounds its own time. Queued items of a cancelled caller are dropped. `close` first processes
    the queue.

    Consumes: items of `submit`. Produces: their results, through futures. The flushing task waits for a first item,
    then for a full batch or the deadline; both are signalled by `_changed`, as is room in the queue.
    """

    def __init__(
        self, process: Callable[[list[ItemT]], Awaitable[Sequence[ResultT]]], batching: BatchingConfig
    ) -> None:
        self.num_calls = 0  # calls of `process`
        self.num_items = 0  # items in those calls
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
        except Exception as error:  # raised to the callers that wait for it  # noqa: BLE001
            for pending in batch:
                if not pending.result.done():
                    pending.result.set_exception(error)
            return
        for pending, result in zip(batch, results, strict=True):
            if not pending.result.done():
                pending.result.set_result(result)
