"""Requests that an engine answers one by one, all at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from nemo_rl.types import Completion, FailedRequest, GenerationRequest

Answer = Callable[[GenerationRequest], Awaitable[Completion | FailedRequest]]


async def as_they_finish(
    requests: Sequence[GenerationRequest], answer: Answer
) -> AsyncIterator[Completion | FailedRequest]:
    """One answer a request; closing the iterator cancels what is left, and returns when it has ended."""
    if len(requests) == 1:  # without a task, which costs more than the rest of this
        yield await answer(requests[0])
        return
    finished: asyncio.Queue[asyncio.Future[Completion | FailedRequest]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(answer(request)) for request in requests]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    try:
        for _ in tasks:
            yield (await finished.get()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
