"""Requests on their way through an engine: the deadline of each, and answers in the order in which they are ready.

Rollouts and the gateway call every engine through `generate_by_deadline`, or `answer_by_deadline` for one request;
engines that answer their requests one by one are written with `as_completed`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from nemo_rl.interfaces import Generation
from nemo_rl.tracing import annotate, now_ns, record_part
from nemo_rl.types import Completion, FailedRequest, GenerationRequest, Guide, RequestPhases

AnswerRequest: TypeAlias = Callable[[GenerationRequest], Awaitable[Completion | FailedRequest]]


class _Late(Exception):
    """A result that did not come in time."""


async def generate_by_deadline(
    generation: Generation, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[Completion | FailedRequest, None]:
    """Yield the results of `generation.generate`, and a FailedRequest for each request that is late.

    `GenerationRequest.timeout_s` is enforced here, whatever the engine: in this process, in an actor, replicated or a
    server. An engine may compute the requests of one call in turn, so the clock of those that are left restarts with
    each result. Late requests are cancelled in the engine. What the engine raises is raised here.
    """
    timeout_s = max((request.timeout_s for request in requests), default=0.0)
    unanswered = dict.fromkeys(request.request_id for request in requests)
    results = aiter(generation.generate(requests))
    try:
        while True:
            result = await _next_by_deadline(results, timeout_s)
            unanswered.pop(result.request_id, None)
            yield result
    except StopAsyncIteration:
        return
    except _Late:
        pass
    finally:
        if isinstance(results, AsyncGenerator):
            await results.aclose()
    for request_id in unanswered:
        yield _late(request_id, timeout_s)


async def answer_by_deadline(generation: Generation, request: GenerationRequest) -> Completion | FailedRequest | None:
    """Return what `generate_by_deadline` would yield for one request, at a third of its cost; None: no result."""
    results = aiter(generation.generate((request,)))
    try:
        result = await _next_by_deadline(results, request.timeout_s)
        if isinstance(result, Completion):
            _annotate_call(request, result)
        return result
    except StopAsyncIteration:
        return None
    except _Late:
        return _late(request.request_id, request.timeout_s)
    finally:
        if isinstance(results, AsyncGenerator):
            await results.aclose()


def _annotate_call(request: GenerationRequest, completion: Completion) -> None:
    """Have the current span, which is of this call alone, tell its tokens and its phases."""
    annotate(
        num_prompt_tokens=len(request.token_ids),
        num_sampled_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
    )
    if completion.phases is not None:
        record_phases(completion.phases)


def record_phases(phases: RequestPhases) -> None:
    """Record the phases of a request that ends now as parts of the current span."""
    end_ns = now_ns()
    for name in ("decode", "prefill", "queue"):
        start_ns = end_ns - round(getattr(phases, f"{name}_s") * 1e9)
        record_part(name, start_ns, end_ns)
        end_ns = start_ns


async def _next_by_deadline(
    results: AsyncIterator[Completion | FailedRequest], timeout_s: float
) -> Completion | FailedRequest:
    """Return the next result; raises _Late if it is late, StopAsyncIteration after the last one."""
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return await anext(results)
    except TimeoutError as error:
        if not deadline.expired():  # the engine's own
            raise
        raise _Late from error


def _late(request_id: str, timeout_s: float) -> FailedRequest:
    return FailedRequest(request_id, f"no result in {timeout_s:g} s", timed_out=True)


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
