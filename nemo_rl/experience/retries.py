"""Generation requests with retries: what fails or misses its deadline is sent again, then becomes a typed Failure."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from nemo_rl.environments.boundary import error_to_failure
from nemo_rl.errors import GenerationError
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.generation.requests import generate_by_deadline
from nemo_rl.interfaces import Generation
from nemo_rl.types import Completion, Failure, FailureClass, GenerationRequest

logger = logging.getLogger(__name__)


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
        with watchdog.waiting_for("generation", len(pending)):
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
    num_left = len(requests)
    try:
        async with aclosing(generate_by_deadline(generation, requests)) as results:
            async for result in results:
                num_left -= 1
                if num_left:
                    watchdog.record_progress()
                if isinstance(result, Completion):
                    completions[result.request_id] = result
                else:
                    failures.setdefault(result.request_id, Failure(FailureClass.INFRA, result.cause))
    except Exception as error:
        return error_to_failure(error, FailureClass.INFRA)
    return error_to_failure(GenerationError("the engine gave no result"), FailureClass.INFRA)
