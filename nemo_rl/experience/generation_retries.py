"""Retries of the engine's requests, which end in a failure of class infra."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.errors import GenerationError
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.generation.requests import answer_by_deadline, generate_by_deadline
from nemo_rl.interfaces import Generation
from nemo_rl.tracing import GENERATION
from nemo_rl.types import Completion, FailedRequest, Failure, FailureClass, GenerationRequest

if TYPE_CHECKING:
    pass  # which imports this module

logger = logging.getLogger(__name__)

NO_RESULT = error_to_failure(GenerationError("the engine gave no result"), FailureClass.INFRA)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of retries of a failed generation request, and the pause before them."""

    max_retries: int
    backoff_s: float  # before the first retry; doubles


async def generate_with_retries(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    *,
    retries: RetryPolicy,
    watchdog: StallWatchdog,
) -> list[Completion | Failure]:
    """Return one result per request, in order. What fails or misses its deadline is retried, then fails (infra)."""
    completions: dict[str, Completion] = {}
    failures: dict[str, Failure] = {}
    pending = list(requests)
    for attempt in range(retries.max_retries + 1):
        if attempt:
            with watchdog.waiting_for("generation to be retried", len(pending)):
                await asyncio.sleep(retries.backoff_s * 2 ** (attempt - 1))
        with watchdog.waiting_for(GENERATION, len(pending)):
            failure = await _try_generate(generation, pending, watchdog, completions, failures)
        pending = [request for request in pending if request.request_id not in completions]
        if not pending:
            break
        for request in pending:
            failures.setdefault(request.request_id, failure)
        logger.info("%d generation requests failed, attempt %d: %s", len(pending), attempt + 1, failure.cause)
    return [completions.get(request.request_id) or failures[request.request_id] for request in requests]


async def _try_generate(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    watchdog: StallWatchdog,
    completions: dict[str, Completion],
    failures: dict[str, Failure],
) -> Failure:
    """Send the requests once; add successes to `completions` and refusals to `failures`.

    Returns the failure of the requests that have no result.
    """

    def sort_in(result: Completion | FailedRequest) -> None:
        if isinstance(result, Completion):
            completions[result.request_id] = result
        else:
            failures.setdefault(result.request_id, Failure(FailureClass.INFRA, result.cause))

    try:
        if len(requests) == 1:
            if (result := await answer_by_deadline(generation, requests[0])) is not None:
                sort_in(result)
            return NO_RESULT
        async with aclosing(generate_by_deadline(generation, requests)) as results:
            async for result in results:
                watchdog.record_progress()
                sort_in(result)
    except Exception as error:  # an engine may raise anything; this request alone fails  # noqa: BLE001
        return error_to_failure(error, FailureClass.INFRA)
    return NO_RESULT
