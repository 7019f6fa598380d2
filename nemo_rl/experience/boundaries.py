"""The two calls that leave the rollout layer, generation and environments: deadlines, retries, typed failures.

Nothing that happens behind them raises here: it becomes a `Failure` of exactly the items it concerns.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from nemo_rl.errors import EnvironmentContractError, GenerationError, RolloutError, summarize_error
from nemo_rl.experience.turns import EnvironmentCall
from nemo_rl.generation.requests import generate_by_deadline
from nemo_rl.interfaces import Environment, Generation
from nemo_rl.types import Completion, EnvStep, Failure, FailureClass, GenerationRequest, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

CANCEL_GRACE_S = 5.0  # for cancelled tasks to clean up; one that swallows its cancellation is left behind


class StallWatchdog:
    """Ends the work it guards when nothing has progressed for `stall_timeout_s`, naming what is waited for.

    Whatever awaits a boundary says so: `with watchdog.waiting_for("environment math"): ...`. Leaving the block is
    progress, and so is `record_progress()`.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._waiting: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._last_progress_at = self._loop.time()

    def waiting_for(self, what: str, count: int = 1) -> "_WaitScope":
        return _WaitScope(self, what, count)

    def record_progress(self) -> None:
        self._last_progress_at = self._loop.time()

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of `work`. Raises RolloutError on a stall; `work` is cancelled then, and when this is."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await watch  # raises
            return await task
        finally:
            await cancel_all((task, watch))

    async def _watch(self) -> None:
        remaining_s = self._stall_timeout_s
        while remaining_s > 0:
            await asyncio.sleep(remaining_s)
            remaining_s = self._last_progress_at + self._stall_timeout_s - self._loop.time()
        waiting = ", ".join(f"{what} ({count})" for what, count in sorted(self._waiting.items()) if count)
        raise RolloutError(
            f"no rollout has progressed for {self._stall_timeout_s:g} s (rollout.stall_timeout_s); "
            f"waiting for: {waiting or 'nothing outside this process'}"
        )


class _WaitScope:
    """The block of `StallWatchdog.waiting_for`."""

    __slots__ = ("_count", "_watchdog", "_what")

    def __init__(self, watchdog: StallWatchdog, what: str, count: int) -> None:
        self._watchdog = watchdog
        self._what = what
        self._count = count

    def __enter__(self) -> None:
        self._watchdog._waiting[self._what] += self._count

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watchdog._waiting[self._what] -= self._count
        self._watchdog.record_progress()


class Supervision:
    """What rollouts have in common that run at once, in one call or in several: a watchdog, and room by task."""

    def __init__(self, stall_timeout_s: float) -> None:
        self.watchdog = StallWatchdog(stall_timeout_s)
        self._semaphores: dict[str, asyncio.Semaphore] = {}

    def concurrency_limit(self, task_name: str, max_concurrency: int) -> asyncio.Semaphore:
        """Held by each rollout of a task while it runs; of the size that was asked for first."""
        return self._semaphores.setdefault(task_name, asyncio.Semaphore(max_concurrency))


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """All results, in order. The first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel what is still running and wait until it has cleaned up; errors on the way out are not raised."""
    running = [task for task in tasks if not task.done()]
    if not running:
        return
    for task in running:
        task.cancel()
    ended, left = await asyncio.wait(running, timeout=CANCEL_GRACE_S)
    for task in ended:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a cancelled rollout raised %r", error)
    if left:
        logger.warning("%d cancelled rollouts have not ended after %g s", len(left), CANCEL_GRACE_S)


class FailureBudget:
    """Stops a step as soon as more than `max_failed_share` of its rollouts have failed."""

    def __init__(self, *, num_rollouts: int, max_failed_share: float) -> None:
        self._num_rollouts = num_rollouts
        self._max_failed_share = max_failed_share
        self._first_failure: Failure | None = None
        self._by_class: Counter[str] = Counter()

    def record(self, trajectory: Trajectory) -> None:
        """Count a rollout that has ended. Raises RolloutError with the first cause above the limit."""
        if trajectory.failure is None:
            return
        self._first_failure = self._first_failure or trajectory.failure
        self._by_class[trajectory.failure.failure_class] += 1
        if self._by_class.total() > self._max_failed_share * self._num_rollouts:
            raise RolloutError(
                f"{self.summary()}, more than rollout.max_failed_share = {self._max_failed_share:g} allows"
            )

    def summary(self) -> str:
        """Example: "3 of 4 rollouts failed (environment 2, infra 1); first cause: environment: ValueError: ..."."""
        by_class = ", ".join(f"{name} {count}" for name, count in sorted(self._by_class.items()))
        first = (
            f"; first cause: {self._first_failure.failure_class}: {self._first_failure.cause}"
            if self._first_failure
            else ""
        )
        counts = f" ({by_class})" if by_class else ""
        return f"{self._by_class.total()} of {self._num_rollouts} rollouts failed{counts}{first}"


class ConsecutiveFailureLimit:
    """Stops background collection when more than `max_consecutive` groups, one after the other, have no survivor."""

    def __init__(self, max_consecutive: int) -> None:
        self._max_in_a_row = max_consecutive
        self._num_consecutive = 0
        self._first_failure: Failure | None = None

    def record(self, group: TrajectoryGroup) -> None:
        """Count a group that has ended. Raises RolloutError with the first cause above the limit."""
        if group.survivors:
            self._num_consecutive, self._first_failure = 0, None
            return
        self._num_consecutive += 1
        self._first_failure = self._first_failure or group.trajectories[0].failure
        if self._num_consecutive > self._max_in_a_row and self._first_failure is not None:
            raise RolloutError(
                f"{self._num_consecutive} groups in a row failed whole, more than "
                f"grpo.async_grpo.max_generation_failures = {self._max_in_a_row} allows; "
                f"first cause: {self._first_failure.failure_class}: {self._first_failure.cause}"
            )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a generation request is asked again."""

    max_retries: int
    backoff_s: float  # before the first one; doubles


async def generate(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    *,
    retries: RetryPolicy,
    watchdog: StallWatchdog,
) -> list[Completion | Failure]:
    """Return one result per request, in order. What fails or misses its deadline is retried, then fails (infra)."""
    completions: dict[str, Completion] = {}
    causes: dict[str, str] = {}
    pending = list(requests)
    for attempt in range(retries.max_retries + 1):
        if attempt:
            with watchdog.waiting_for("generation to be retried", len(pending)):
                await asyncio.sleep(retries.backoff_s * 2 ** (attempt - 1))
        with watchdog.waiting_for("generation", len(pending)):
            error = await _try_generate(generation, pending, watchdog, completions, causes)
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
    timeout_s: float | None = None,
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


async def _try_generate(
    generation: Generation,
    requests: Sequence[GenerationRequest],
    watchdog: StallWatchdog,
    completions: dict[str, Completion],
    causes: dict[str, str],
) -> str:
    """Ask once: successes go to `completions`, refusals to `causes`; returns why the others have no result."""
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
                    causes.setdefault(result.request_id, result.cause)
    except Exception as error:
        logger.debug("a generation call of %d requests failed", len(requests), exc_info=error)
        return summarize_error(error)
    return summarize_error(GenerationError("the engine gave no result"))
