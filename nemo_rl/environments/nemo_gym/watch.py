"""The watch on a stack that the run started: whether its processes live and each of its servers responds.

Gym checks for dead servers once a minute, never for stopped ones, and its agents retry calls of a dead server forever.
So the watch probes all servers, and a stack that has lost one has ended: its rows end at once, and do not count as
failed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

import aiohttp

from nemo_rl.environments.nemo_gym.reply import GymStackEnded
from nemo_rl.environments.nemo_gym.servers import REQUEST_TIMEOUT_S, ProbeResult, open_connections, probe

logger = logging.getLogger(__name__)

PERIOD_S = 2.0  # between two rounds of probes
MIN_SILENT_PROBES = 2  # one may be lost because the event loop of this process was blocked


class StackWatch:
    """Probes all servers of a stack from `start` to `close`.

    Its task waits for responses, at most REQUEST_TIMEOUT_S, and PERIOD_S between rounds unless `confirm` asks for one.
    It produces the end of the stack, which `check` and `confirm` raise and which expires the deadlines of `cut_short`.
    """

    def __init__(self, servers: Mapping[str, str], check_process: Callable[[], None], *, timeout_s: float) -> None:
        """Take the addresses of the servers by name, and a function that raises GymStackEnded if the process has ended.

        A server that refuses connections is dead; one that gives no response for `timeout_s` counts as dead.
        """
        self._servers = servers
        self._check_process = check_process
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None
        self._end: GymStackEnded | None = None
        self._deadlines: set[asyncio.Timeout] = set()
        self._silent: dict[str, tuple[float, int]] = {}  # start of the silence, and number of failed probes
        self._rounds_begun = 0
        self._last_responses = dict.fromkeys(servers, 0)  # by server, the round of its last response
        self._wake = asyncio.Event()
        self._round_ended = asyncio.Event()

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name="watch of NeMo Gym")

    async def close(self) -> None:
        """End the task; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None
            self._notify()

    def check(self) -> None:
        """Raise GymStackEnded if the stack is known to be over."""
        if self._end is not None:
            raise GymStackEnded(self._end.problem, url=self._end.url)

    async def confirm(self) -> None:
        """Return once each server has responded to a probe sent after this call; raise GymStackEnded otherwise.

        Each does so or counts as dead within the watch's `timeout_s`.
        """
        needed = self._rounds_begun + 1
        while min(self._last_responses.values(), default=needed) < needed and self._task is not None:
            self.check()
            self._wake.set()
            await self._round_ended.wait()
        self.check()

    @contextlib.contextmanager
    def cut_short(self, deadline: asyncio.Timeout) -> Iterator[None]:
        """Let the end of the stack expire a deadline inside the block; raise GymStackEnded if it is over already."""
        self.check()
        self._deadlines.add(deadline)
        try:
            yield
        finally:
            self._deadlines.discard(deadline)

    async def _run(self) -> None:
        try:
            await self._probe_until_the_end()
        except Exception as error:  # else callers of `confirm` would wait forever  # noqa: BLE001
            self._finish(GymStackEnded(f"the watch has failed: {type(error).__name__}: {error}"))

    async def _probe_until_the_end(self) -> None:
        async with open_connections() as http:
            while self._end is None:
                self._wake.clear()
                await self._probe_all(http)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._wake.wait()

    async def _probe_all(self, http: aiohttp.ClientSession) -> None:
        self._rounds_begun += 1
        try:
            self._check_process()
        except GymStackEnded as error:
            self._finish(error)
            return
        await asyncio.gather(*(self._probe(http, name, url) for name, url in self._servers.items()))
        self._notify()

    async def _probe(self, http: aiohttp.ClientSession, name: str, url: str) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        result = await probe(http, url, min(REQUEST_TIMEOUT_S, self._timeout_s / MIN_SILENT_PROBES))
        if result is ProbeResult.RESPONDS:
            self._silent.pop(name, None)
            self._last_responses[name] = self._rounds_begun
            return
        since, count = self._silent.get(name, (began, 0))
        self._silent[name] = since, count + 1
        silent_s = loop.time() - since
        if result is ProbeResult.REFUSED:
            self._finish(GymStackEnded(f"server {name!r} has ended: it refuses connections", url=url))
        elif count + 1 >= MIN_SILENT_PROBES and silent_s >= self._timeout_s:
            self._finish(GymStackEnded(f"no response from server {name!r} for {silent_s:.0f} s", url=url))

    def _finish(self, error: GymStackEnded) -> None:
        if self._end is not None:
            return
        self._end = error
        logger.error("NeMo Gym's stack is over: %s", error)
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)
        self._notify()

    def _notify(self) -> None:
        """Wake all callers that wait for the end of a round."""
        ended, self._round_ended = self._round_ended, asyncio.Event()
        ended.set()
