"""Calls of user code that raised, made again: a service that refuses one call in thirty costs no rollout.

What is tried again gets a copy of its state as it was before, since the call that raised may have changed it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from nemo_rl.config.environment import CallRetriesConfig
from nemo_rl.environments.states import copy_or_none, copy_state
from nemo_rl.errors import EnvironmentContractError, summarize_error

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
StateT = TypeVar("StateT")


@dataclass(slots=True)
class CallRetries:
    """Retries of calls that raised: how often, until when, and whether that has been logged."""

    max_retries: int
    backoff_s: float  # pause before the first retry if no other call raised; doubles
    timeout_s: float  # deadline of all calls of an item together, pauses and waits among them
    user_code: str = ""  # named in the log
    is_logged: bool = False

    @classmethod
    def of(
        cls, section: CallRetriesConfig | None, default: int, timeout_s: float | None, user_code: str
    ) -> "CallRetries | None":
        """Return the retries of a section, whose `max_retries` None means `default`; None if there are none."""
        if section is None or timeout_s is None:
            return None
        max_retries = default if section.max_retries is None else section.max_retries
        return cls(max_retries, section.backoff_s, timeout_s, user_code) if max_retries else None

    async def call(self, step: Callable[[StateT], Awaitable[ResultT]], state: StateT) -> ResultT:
        """Return the result of `step(state)`; after an error it is called with copies of the state as it was.

        Raises the last error, and the first if the state cannot be copied.
        """
        before, started_s = copy_or_none(state), asyncio.get_running_loop().time()
        try:
            return await step(state)
        except Exception as error:  # user code
            if before is None:
                raise
            return await self.repeat(lambda: step(copy_state(before)), error, started_s=started_s)

    async def repeat(
        self, call: Callable[[], Awaitable[ResultT]], error: Exception, *, started_s: float, pauses_first: bool = True
    ) -> ResultT:
        """Return the result of the first call that raises nothing.

        `error` is what the call that began at `started_s`, on the loop's clock, has raised. Raises the last error: at
        once if the code broke its contract or tried to end the run, which it would do again, and `timeout_s` after
        `started_s` at the latest.
        """
        try:
            async with asyncio.timeout_at(started_s + self.timeout_s) as deadline:
                for attempt in range(self.max_retries):
                    if isinstance(error, EnvironmentContractError):
                        break
                    self._log(error)
                    await asyncio.sleep(self.backoff_s * 2**attempt if attempt or pauses_first else 0.0)
                    try:
                        return await call()
                    except Exception as again:  # user code  # noqa: BLE001
                        error = again
        except TimeoutError:
            if not deadline.expired():
                raise
        raise error

    def _log(self, error: Exception) -> None:
        level = logging.DEBUG if self.is_logged else logging.WARNING
        self.is_logged = True
        logger.log(
            level,
            "%s raised %s; it is called again for each item, %d times at most; further calls are logged at DEBUG",
            self.user_code or "an environment",
            summarize_error(error),
            self.max_retries,
        )
