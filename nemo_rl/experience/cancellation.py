"""Running coroutines together, and cancelling them within a deadline."""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable
from typing import Any, TypeVar

from nemo_rl.environments.user_code import UserCodeLoop

logger = logging.getLogger(__name__)

SHUTDOWN_S = 30.0  # limit for all cancelled tasks of an event loop to end
ResultT = TypeVar("ResultT")
CANCEL_GRACE_S = 5.0  # limit for cancelled tasks to clean up; a task that ignores its cancellation is left running


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return all results, in order. The first error cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel the unfinished tasks and wait for their clean-up; errors raised meanwhile are only logged."""
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
        logger.warning("%d cancelled rollouts are still running after %g s", len(left), CANCEL_GRACE_S)


def run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work` as `asyncio.run` does, on a loop that user code cannot end.

    Tasks that ignore their cancellation are not waited for.
    """
    runner = asyncio.Runner(loop_factory=UserCodeLoop)
    try:
        return runner.run(work)
    finally:
        loop = runner.get_loop()
        if loop.run_until_complete(cancel_tasks(asyncio.all_tasks(loop))):
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()  # the runner's own way of closing would wait for them
        else:
            runner.close()


async def cancel_tasks(tasks: Collection[asyncio.Task[Any]], timeout_s: float = SHUTDOWN_S) -> int:
    """Cancel tasks and wait for their end; return how many still run after `timeout_s`, which the log names."""
    for task in tasks:
        task.cancel()
    ended, pending = await asyncio.wait(tasks, timeout=timeout_s) if tasks else (set(), set())
    for task in ended:
        _ = task.cancelled() or task.exception()  # retrieved, else asyncio would log it
    for task in pending:
        frames = task.get_stack(limit=1)
        where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "unknown"
        name = getattr(task.get_coro(), "__qualname__", task.get_name())
        logger.error("abandoned task %s at %s: it ignored its cancellation for %g s", name, where, timeout_s)
    return len(pending)
