"""Calls of user code that raised, made again: a service that refuses one call in thirty costs no rollout.

An item that is tried again gets a new copy of its state, since the call that raised may have changed the one it had.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.config.environment import CallRetriesConfig
from nemo_rl.errors import EnvironmentContractError, summarize_error

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class CallRetries:
    """How often calls that raised are made again, until when, and whether that has been said."""

    section: CallRetriesConfig
    timeout_s: float  # for the calls of an item together, its pauses among them
    user_code: str = ""  # named in the log
    is_logged: bool = False

    async def call(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Return the result of `call`, made again after errors; raises the last one."""
        started_s = asyncio.get_running_loop().time()
        try:
            return await call()
        except Exception as error:  # user code  # noqa: BLE001
            return await self.repeat(call, error, started_s=started_s)

    async def repeat(
        self, call: Callable[[], Awaitable[ResultT]], error: Exception, *, started_s: float, pauses_first: bool = True
    ) -> ResultT:
        """Return the result of the first call that raises nothing.

        `error` is what the call that began at `started_s`, on the loop's clock, has raised. Raises the last error: at
        once if the code broke its contract or tried to end the run, which it would do again.
        """
        loop = asyncio.get_running_loop()
        for attempt in range(self.section.max_retries):
            pause_s = self.section.backoff_s * 2**attempt if attempt or pauses_first else 0.0
            if isinstance(error, EnvironmentContractError) or loop.time() + pause_s >= started_s + self.timeout_s:
                break
            self._log(error)
            await asyncio.sleep(pause_s)
            try:
                return await call()
            except Exception as again:  # user code  # noqa: BLE001
                error = again
        raise error

    def _log(self, error: Exception) -> None:
        level = logging.DEBUG if self.is_logged else logging.WARNING
        self.is_logged = True
        logger.log(
            level,
            "%s raised %s; it is called again for each item, %d times at most; further calls are logged at DEBUG",
            self.user_code or "an environment",
            summarize_error(error),
            self.section.max_retries,
        )
