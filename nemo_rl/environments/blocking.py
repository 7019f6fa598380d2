"""Blocking calls off the event loop, in threads that cannot keep the process from ending."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class BlockingCalls:
    """At most `max_at_once` blocking calls; more wait for room.

    Each has a daemon thread of its own (some 50 µs), unlike an executor's, which the interpreter joins at its end. A
    call that is cancelled or out of time leaves its thread behind, which no one can stop, and gives its room free.
    """

    def __init__(self, name: str, max_at_once: int) -> None:
        self._name = name
        self._room = asyncio.Semaphore(max_at_once)

    async def run(self, function: Callable[[], ResultT], *, timeout_s: float | None = None) -> ResultT:
        """The function's result or exception; TimeoutError `timeout_s` after it began."""
        async with self._room:
            future: Future[ResultT] = Future()
            threading.Thread(target=_settle, args=(future, function), name=self._name, daemon=True).start()
            try:
                async with asyncio.timeout(timeout_s) as deadline:
                    return await asyncio.wrap_future(future)
            except TimeoutError as error:
                if deadline.expired():
                    raise TimeoutError(f"no answer in {timeout_s:g} s") from error
                raise


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives an awaitable: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - the method itself, not whether it is callable
    )


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
