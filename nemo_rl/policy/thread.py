"""The one thread that a policy lives on, so that training never blocks the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

ResultT = TypeVar("ResultT")


class PolicyThread:
    """Runs calls one after the other on a thread of its own.

    Grad mode and CUDA streams belong to a thread, and torch may give a thread another number of threads than its
    creator has, so everything of one policy happens on the same one, with the creator's number.
    """

    def __init__(self, name: str = "policy") -> None:
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=name,
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )

    async def run(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """The function's result; the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    def run_blocking(self, function: Callable[..., ResultT], *args: Any) -> ResultT:
        """The function's result, waiting for it; for construction, before an event loop has work."""
        return self._executor.submit(function, *args).result()

    def close(self) -> None:
        """Let the running call end and join the thread; calls afterwards raise RuntimeError."""
        self._executor.shutdown(wait=True)
