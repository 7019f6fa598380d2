"""The two calls that leave the rollout layer, generation and environments: deadlines, retries, typed failures.

Nothing that happens behind them raises here: it becomes a `Failure` of exactly the items it concerns.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from nemo_rl.errors import EnvironmentContractError, GenerationError, summarize_error
from nemo_rl.experience.supervision import StallWatchdog
from nemo_rl.experience.turns import EnvironmentCall
from nemo_rl.interfaces import Environment, Generation
from nemo_rl.types import Completion, EnvStep, Failure, FailureClass, GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a generation request is asked again."""

    max_retries: int
    backoff_s: float  # before the first one; doubles


async def generate(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    *,
    timeout_s: float,
    retries: Retries,
    watchdog: StallWatchdog,
) -> list[Completion | Failure]:
    """One result a request, in order. What fails or takes longer than `timeout_s` is asked again, then fails (infra).

    The deadline is that of each further result: a batch may take longer as a whole.
    """
    completions: dict[str, Completion] = {}
    causes: dict[str, str] = {}
    pending = list(requests)
    for attempt in range(retries.max_retries + 1):
        if attempt:
            with watchdog.waiting_for("generation to be retried", len(pending)):
                await asyncio.sleep(retries.backoff_s * 2 ** (attempt - 1))
        with watchdog.waiting_for("generation", len(pending)):
            error = await _attempt(generation, pending, timeout_s, watchdog, completions, causes)
        pending = [request for request in pending if request.request_id not in completions]
        if not pending:
            break
        for request in pending:
            causes.setdefault(request.request_id, error)
        logger.info("%d generation requests failed, attempt %d: %s", len(pending), attempt + 1, error)
    return [completions.get(r.request_id) or Failure(FailureClass.INFRA, causes[r.request_id]) for r in requests]


async def step_environment(
    environment: Environment,
    task_name: str,
    calls: Sequence[EnvironmentCall],
    *,
    timeout_s: float | None,
    watchdog: StallWatchdog,
) -> list[EnvStep | Failure]:
    """One result a call, in order. An exception, a wrong count or no answer in `timeout_s` fails all of them."""
    task = asyncio.current_task()
    try:
        with watchdog.waiting_for(f"environment {task_name}", len(calls)):
            async with asyncio.timeout(timeout_s) as deadline:
                results = await environment.step([c.conversation for c in calls], [c.state for c in calls])
        if len(results) != len(calls):
            raise EnvironmentContractError(f"{len(results)} results for {len(calls)} conversations")
        return list(results)
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        cause = summarize_error(error)  # something inside the environment was cancelled, not this rollout
    except Exception as error:
        cause = f"no answer in {timeout_s:g} s" if deadline.expired() else summarize_error(error)
        logger.debug("environment %s failed %d rollouts", task_name, len(calls), exc_info=error)
    return [Failure(FailureClass.ENVIRONMENT, f"{task_name}: {cause}")] * len(calls)


async def _attempt(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    timeout_s: float,
    watchdog: StallWatchdog,
    completions: dict[str, Completion],
    causes: dict[str, str],
) -> str:
    """Ask once: successes go to `completions`, refusals to `causes`; returns why the others have no result."""
    clock, num_left = asyncio.get_running_loop().time, len(requests)
    stream = generation.generate(requests)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            async for result in stream:
                num_left -= 1
                if num_left:
                    watchdog.progressed()
                    deadline.reschedule(clock() + timeout_s)
                if isinstance(result, Completion):
                    completions[result.request_id] = result
                else:
                    causes.setdefault(result.request_id, result.cause)
    except Exception as error:
        logger.debug("a generation call of %d requests failed", len(requests), exc_info=error)
        return f"no result in {timeout_s:g} s" if deadline.expired() else summarize_error(error)
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
    return summarize_error(GenerationError("the engine gave no result"))
