"""Collect the items of many pipelined rollouts into few calls of an environment."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.environment import Batching
from nemo_rl.environments.contract import StepResult, checked_step
from nemo_rl.errors import EnvironmentFault
from nemo_rl.interfaces import Environment
from nemo_rl.types import Message


@dataclass(frozen=True, slots=True)
class _Item:
    conversation: Sequence[Message]
    state: Mapping[str, Any]
    result: asyncio.Future[StepResult]
    arrived_s: float  # on the loop's clock


class BatchedEnvironment:
    """An environment in front of any other: items of concurrent `step` calls share the inner environment's calls.

    An inner call begins when `max_batch_size` items wait, or `max_wait_ms` after the oldest one came, whatever their
    number; several may run at once. At most `max_queue_size` items wait, further callers wait for room. A call that
    passes `timeout_s`, raises or gives a wrong number of results fails its own items and no others. A cancelled
    caller's waiting items are dropped. `close` first answers what waits.

    Consumes: items of `step`. Produces: their results, through futures. The flushing task waits for a first item, then
    for a full batch or the deadline; both are signalled by `_changed`, as is room in the queue.
    """

    def __init__(self, inner: Environment, batching: Batching, timeout_s: float | None) -> None:
        self._inner = inner
        self._batching = batching
        self._timeout_s = timeout_s
        self._waiting: deque[_Item] = deque()
        self._changed = asyncio.Condition()
        self._flusher: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False

    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> Sequence[StepResult]:
        loop = asyncio.get_running_loop()
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush_forever())
        results: list[asyncio.Future[StepResult]] = []
        try:
            for conversation, state in zip(conversations, states, strict=True):
                result: asyncio.Future[StepResult] = loop.create_future()
                results.append(result)
                await self._put(_Item(conversation, state, result, loop.time()))
            return [await result for result in results]
        finally:
            for result in results:
                result.cancel()  # of items that wait still, where this call was cancelled

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._flusher is not None:
            await self._flusher
        await asyncio.gather(*self._calls)
        await self._inner.close()

    async def _put(self, item: _Item) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._batching.max_queue_size)
            if self._closed:
                raise EnvironmentFault("the environment is closed")
            self._waiting.append(item)
            self._changed.notify_all()

    async def _flush_forever(self) -> None:
        while batch := await self._next_batch():
            call = asyncio.create_task(self._answer(batch))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _next_batch(self) -> list[_Item]:
        """The next items for one call; none when closed and everything has been answered."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._closed or self._waiting)
                await self._wait_for_more()
                size = min(len(self._waiting), self._batching.max_batch_size)
                batch = [self._waiting.popleft() for _ in range(size)]
                self._changed.notify_all()
            batch = [item for item in batch if not item.result.done()]
            if batch or (self._closed and not self._waiting):
                return batch

    async def _wait_for_more(self) -> None:
        """Until a call's worth of items waits, or the oldest has waited long enough, or the queue can hold no more."""
        enough = min(self._batching.max_batch_size, self._batching.max_queue_size)
        if self._closed or len(self._waiting) >= enough:
            return
        deadline_s = self._waiting[0].arrived_s + self._batching.max_wait_ms / 1000
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._changed.wait_for(lambda: self._closed or len(self._waiting) >= enough)
        except TimeoutError:
            return

    async def _answer(self, batch: list[_Item]) -> None:
        conversations = [item.conversation for item in batch]
        states = [item.state for item in batch]
        results = await checked_step(self._inner, conversations, states, timeout_s=self._timeout_s)
        for item, result in zip(batch, results, strict=True):
            if not item.result.done():
                item.result.set_result(result)
