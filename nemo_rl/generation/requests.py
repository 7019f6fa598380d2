"""Requests on their way through an engine: the deadline of each, and answers in the order in which they are ready.

Rollouts and the gateway call every engine through `generate_by_deadline`; engines that answer their requests one by one
are written with `as_completed`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from nemo_rl.interfaces import Generation
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, Guide

AnswerRequest: TypeAlias = Callable[[GenerationRequest], Awaitable[Completion | FailedRequest]]


async def generate_by_deadline(
    generation: Generation, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[Completion | FailedRequest, None]:
    """Yield the results of `generation.generate`, and a FailedRequest for each request that is late.

    The one place where `GenerationRequest.timeout_s` is enforced, whatever the engine: in this process, in an actor,
    replicated or a server. An engine may compute the requests of one call in turn, so the clock of those that are left
    restarts with each result. Late requests are cancelled in the engine. What the engine raises is raised here.
    """
    clock, timeout_s = asyncio.get_running_loop().time, max((request.timeout_s for request in requests), default=0.0)
    unanswered = dict.fromkeys(request.request_id for request in requests)
    results = aiter(generation.generate(requests))
    try:
        while True:
            try:
                async with asyncio.timeout_at(clock() + timeout_s) as deadline:
                    result = await anext(results)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not deadline.expired():  # the engine's own
                    raise
                break
            unanswered.pop(result.request_id, None)
            yield result
    finally:
        if isinstance(results, AsyncGenerator):
            await results.aclose()
    for request_id in unanswered:
        yield FailedRequest(request_id, f"no result in {timeout_s:g} s", timed_out=True)


async def as_completed(
    requests: Sequence[GenerationRequest], answer: AnswerRequest
) -> AsyncIterator[Completion | FailedRequest]:
    """Yield one answer per request; closing the iterator cancels the others, and returns once they have ended."""
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


def structured_outputs(guide: Guide) -> dict[str, Any]:
    """Return vLLM's form of a guide."""
    if guide.kind == "json_object":
        return {"json_object": True}
    return {"json" if guide.kind == "json_schema" else guide.kind: guide.text}
