"""A client of a NeMo Gym stack: discovers its servers, waits for them, and sends rows to its agents.

A row is sent again only if no server can have started it: after a refused connection, 429, 503, or a failure at an
episode's admission. Each attempt has a number of its own. A server that was restarted at another address is discovered
again through the head server.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from nemo_rl.distributed.machine import max_connections, raise_file_limit
from nemo_rl.environments.nemo_gym.entry import NemoGymConfig, ServedPolicy
from nemo_rl.environments.nemo_gym.failures import Delivery
from nemo_rl.environments.nemo_gym.protocols import RolloutIdentity
from nemo_rl.environments.nemo_gym.reply import (
    GymEpisodeFailed,
    GymError,
    GymInvalidReply,
    GymRefused,
    GymReply,
    GymUnavailable,
)
from nemo_rl.environments.nemo_gym.servers import (
    CONNECTION_ERRORS,
    GATEWAY_STATUSES,
    GymServer,
    GymServers,
    describe_error,
    discover,
    find_unresponsive_servers,
    open_connections,
)
from nemo_rl.environments.nemo_gym.stack import GymStack
from nemo_rl.environments.nemo_gym.watch import StackWatch
from nemo_rl.errors import ConfigError
from nemo_rl.tracing import trace_headers

logger = logging.getLogger(__name__)

POLL_S = 0.5  # between two probes of servers that are not up yet
MAX_BACKOFF_S = 30.0
RETRYABLE_STATUSES = (429, 503)  # the row was not started
MAX_ERROR_TEXT_CHARACTERS = 500  # characters of a response that an error quotes


class GymClient:
    """A client of one stack, made in any thread and used in one event loop: `connect` first, `close` last."""

    def __init__(self, section: NemoGymConfig, *, started: GymStack | None = None, key: str = "env.nemo_gym") -> None:
        """Take the stack that the run started, else the section's `head_url`; `key` is the key of the entry."""
        url = started.head_url if started is not None else section.head_url
        if url is None:
            raise ConfigError(f"{key}.head_url", None, "required unless the run starts a stack")
        self._head_url = url.rstrip("/")
        self._stack_id = started.stack_id if started is not None else None
        self._section = section
        self._key = key
        self._servers = GymServers({})
        self._http: aiohttp.ClientSession | None = None
        self._watch: StackWatch | None = None  # None: the run did not start the stack
        self._slots = asyncio.Semaphore(min(section.max_concurrency, max_connections(raise_file_limit())))

    @property
    def known_agents(self) -> tuple[str, ...]:
        """Return the names that rows may give: of agents and environment servers, once connected."""
        return tuple(sorted(self._servers.runners))

    async def connect(self, expected_agents: Collection[str], *, check: Callable[[], None] | None = None) -> None:
        """Discover the stack's servers and wait for the expected agents and all servers that they need.

        `check` is called before each probe and may raise, for a started stack that has died. Raises ConfigError for an
        agent that the stack does not have, GymUnavailable naming the servers that do not respond in `start_timeout_s`.
        """
        unresponsive: tuple[str, ...] = ()
        last: GymError | None = None
        try:
            async with asyncio.timeout(self._section.start_timeout_s):
                while True:
                    if check is not None:
                        check()
                    try:
                        unresponsive, last = await self._find_unresponsive(expected_agents), None
                        if not unresponsive:
                            return
                    except GymUnavailable as error:
                        last = error
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            within = f"within {self._key}.start_timeout_s = {self._section.start_timeout_s:g} s"
            if last is not None:
                raise GymUnavailable(f"{last.problem}, {within}", url=last.url) from error
            text = f"no response from {', '.join(unresponsive) or 'its servers'} {within}"
            raise GymUnavailable(text, url=self._head_url) from error

    async def run(self, agent: str, row: Mapping[str, Any], identity: RolloutIdentity | None = None) -> GymReply:
        """Return one rollout of `row` by `agent`, retries included within `timeout_s`; raises GymError.

        `timeout_s` does not include the wait while `max_concurrency` other rows are in flight. With a watched stack, an
        error other than GymStackEnded is the row's own: before it is raised all servers have responded again, which
        takes at most `server_timeout_s` more. Without an identity the rollout is given one.
        """
        async with self._slots:
            try:
                return await self._run_within_deadline(agent, row, identity or RolloutIdentity())
            except GymError:
                if self._watch is not None:
                    await self._watch.confirm()
                raise

    def watch(self, check_process: Callable[[], None]) -> None:
        """Watch the stack, once connected: after the end of any of its servers, `run` raises GymStackEnded.

        `check_process` raises it if the process of the stack has ended.
        """
        servers = {server.name: server.url for server in self._servers.by_name.values()}
        servers["head server"] = self._head_url
        self._watch = StackWatch(servers, check_process, timeout_s=self._section.server_timeout_s)
        self._watch.start()

    async def close(self) -> None:
        """End the watch and close all connections; idempotent."""
        if self._watch is not None:
            await self._watch.close()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _find_unresponsive(self, expected_agents: Collection[str]) -> tuple[str, ...]:
        self._servers = await discover(self._session(), self._head_url, stack_id=self._stack_id)
        for agent in expected_agents:
            if agent not in self._servers.runners:
                problem = "the stack has no such agent"
                raise ConfigError(f"{self._key}: agent_ref.name", agent, problem, known=self.known_agents)
        return await find_unresponsive_servers(self._session(), self._servers.required_by(expected_agents))

    async def _run_within_deadline(self, agent: str, row: Mapping[str, Any], identity: RolloutIdentity) -> GymReply:
        try:
            async with asyncio.timeout(self._section.timeout_s) as deadline:
                if self._watch is None:
                    return await self._run(agent, row, identity)
                with self._watch.cut_short(deadline):
                    return await self._run(agent, row, identity)
        except TimeoutError as error:
            text = f"no reply within {self._key}.timeout_s = {self._section.timeout_s:g} s"
            raise _lost(text, agent, self._server(agent).url) from error

    async def _run(self, agent: str, row: Mapping[str, Any], identity: RolloutIdentity) -> GymReply:
        attempts = self._section.max_retries + 1
        for attempt in range(attempts):
            server = self._server(agent)
            sent = server.protocol.encode(server.name, row, identity, attempt)
            try:
                reply = await self._post(agent, server, sent)
                return replace(reply, capture_key=identity.capture_key(attempt) if server.protocol.has_identity else "")
            except _RowNotAccepted as error:
                if attempt + 1 == attempts:
                    raise error.to_unavailable(agent, server.url, attempts) from error
                logger.warning("retrying agent %r at %s: %s", agent, server.url, error)
            await asyncio.sleep(min(self._section.retry_backoff_s * 2**attempt, MAX_BACKOFF_S))
            await self._rediscover()
        raise AssertionError("unreachable")

    async def _post(self, agent: str, server: GymServer, sent: Mapping[str, Any]) -> GymReply:
        url = f"{server.url}/run"
        try:
            post = self._session().post(url, json=sent, allow_redirects=False, headers=trace_headers())
            async with post as response:
                status, body = response.status, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise _RowNotAccepted(describe_error(error), "not_sent") from error
        except CONNECTION_ERRORS as error:
            raise _lost(f"connection lost ({describe_error(error)})", agent, url) from error
        if status in RETRYABLE_STATUSES:
            raise _RowNotAccepted(f"HTTP {status}: {_error_text(body)}", "not_sent")
        if status in GATEWAY_STATUSES:
            raise _lost(f"HTTP {status}: {_error_text(body)}", agent, url)
        if status != 200:
            raise GymRefused(f"HTTP {status}: {_error_text(body)}", agent=agent, url=url)
        try:
            return server.protocol.decode(json.loads(body), sent)
        except GymEpisodeFailed as error:
            if error.failure.may_be_sent_again:
                raise _RowNotAccepted(str(error.failure), "delivered") from error
            raise GymEpisodeFailed(error.failure, agent=agent, url=url) from error
        except GymInvalidReply as error:
            raise GymInvalidReply(error.problem, agent=agent, url=url) from error
        except (ValueError, RecursionError) as error:  # json's own
            raise GymInvalidReply(f"the reply is not JSON ({describe_error(error)})", agent=agent, url=url) from error

    async def _rediscover(self) -> None:
        """Refresh the addresses after a failure; keep the old ones if the head server does not respond."""
        try:
            self._servers = await discover(self._session(), self._head_url, stack_id=self._stack_id)
        except GymError as error:
            logger.warning("cannot rediscover NeMo Gym's servers: %s", error)

    def _server(self, agent: str) -> GymServer:
        runners = self._servers.runners
        if agent not in runners:
            problem = "the stack has no such agent" if runners else "not connected to the stack"
            raise GymRefused(f"{problem}; known: {', '.join(self.known_agents)}", agent=agent, url=self._head_url)
        return runners[agent]

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = open_connections()
        return self._http


class _RowNotAccepted(Exception):
    """No server has started the row."""

    def __init__(self, problem: str, delivery: Delivery) -> None:
        super().__init__(problem)
        self._delivery: Delivery = delivery

    def to_unavailable(self, agent: str, url: str, attempts: int) -> GymUnavailable:
        problem = f"not accepted in {attempts} attempts ({self})"
        return GymUnavailable(problem, agent=agent, url=url, delivery=self._delivery)


def _lost(problem: str, agent: str, url: str) -> GymUnavailable:
    """Return the error of a row that a server may have started."""
    return GymUnavailable(problem, agent=agent, url=url, delivery="possibly_delivered")


def _error_text(body: bytes) -> str:
    """Return the text of a response on one line; Gym answers 500 with a JSON string."""
    text = body.decode(errors="replace")
    try:
        decoded = json.loads(text)
        text = decoded if isinstance(decoded, str) else text
    except ValueError:
        pass
    return " ".join(text.split())[:MAX_ERROR_TEXT_CHARACTERS] or "no text"


async def open_gym_client(
    name: str,
    section: NemoGymConfig,
    *,
    agents: Collection[str],
    policy: ServedPolicy,
    run_dir: Path,
    stack: AsyncExitStack,
) -> GymClient:
    """Return a client of the NeMo Gym stack, which is started in `run_dir` if configured; `stack` closes both.

    Raises ConfigError for one of `agents` that it does not have, GymUnavailable for servers that respond too late.
    """
    key, started = f"env.{name}", None
    if section.config_paths is not None:
        started = await GymStack.start(section, policy=policy, run_dir=run_dir, key=key)
        stack.push_async_callback(started.close)
    client = GymClient(section, started=started, key=key)
    stack.push_async_callback(client.close)
    await client.connect(agents, check=started.check if started else None)
    if started is not None:
        client.watch(started.check)
    return client
