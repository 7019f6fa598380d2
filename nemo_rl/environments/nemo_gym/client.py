"""A client of a NeMo Gym stack: discovers its servers, waits for them, and sends rows to its agents.

A row is sent again only if no server can have started it: after a refused connection, 429 or 503. An agent that was
restarted at another address is discovered again through the head server.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl.distributed.machine import max_connections, raise_file_limit
from nemo_rl.environments.nemo_gym.entry import AGENT_SERVERS, SERVER_KINDS, NemoGymConfig
from nemo_rl.environments.nemo_gym.reply import (
    GymError,
    GymInvalidReply,
    GymRefused,
    GymReply,
    GymUnavailable,
    parse_reply,
)
from nemo_rl.errors import ConfigError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0  # of a request to the head server, or of a probe of a server
ANY_ADDRESS = ("0.0.0.0", "::")
CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
POLL_S = 0.5  # between two probes of servers that are not up yet
MAX_BACKOFF_S = 30.0
RETRYABLE_STATUSES = (429, 503)  # the row was not started
GATEWAY_STATUSES = (502, 503, 504)
MAX_ERROR_TEXT_CHARACTERS = 500  # of a response's text in an error


@dataclass(frozen=True, slots=True)
class GymServer:
    """One server of a stack."""

    name: str
    kind: str  # one of SERVER_KINDS
    url: str
    needs: tuple[str, ...]  # names of the servers that it calls


@dataclass(frozen=True, slots=True)
class GymServers:
    """The servers of a stack by name."""

    by_name: Mapping[str, GymServer]

    @property
    def agents(self) -> dict[str, str]:
        """Return the addresses of the agents by name."""
        return {name: server.url for name, server in self.by_name.items() if server.kind == AGENT_SERVERS}

    def required_by(self, agents: Collection[str]) -> tuple[GymServer, ...]:
        """Return these agents and all servers that they need, directly or indirectly, ordered by name."""
        found: set[str] = set()
        pending = [name for name in agents if name in self.by_name]
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += [needed for needed in self.by_name[name].needs if needed in self.by_name]
        return tuple(self.by_name[name] for name in sorted(found))


class GymClient:
    """A client of one stack, made in any thread and used in one event loop: `connect` first, `close` last."""

    def __init__(self, section: NemoGymConfig, *, head_url: str | None = None, key: str = "env.nemo_gym") -> None:
        """Take the `head_url` of a stack that the run started, else the section's; `key` is the key of the entry."""
        url = head_url or section.head_url
        if url is None:
            raise ConfigError(f"{key}.head_url", None, "required unless the run starts a stack")
        self._head_url = url.rstrip("/")
        self._section = section
        self._key = key
        self._servers = GymServers({})
        self._http: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(min(section.max_concurrency, max_connections(raise_file_limit())))

    @property
    def known_agents(self) -> tuple[str, ...]:
        """Return the names of the stack's agents, once connected."""
        return tuple(sorted(self._servers.agents))

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

    async def run(self, agent: str, row: Mapping[str, Any]) -> GymReply:
        """Return one rollout of `row` by `agent`, retries included within `timeout_s`; raises GymError.

        The time of a row that waits because `max_concurrency` others are in flight has not started.
        """
        async with self._slots:
            try:
                async with asyncio.timeout(self._section.timeout_s):
                    return await self._run(agent, row)
            except TimeoutError as error:
                text = f"no reply within {self._key}.timeout_s = {self._section.timeout_s:g} s"
                raise GymUnavailable(text, agent=agent, url=self._url(agent)) from error

    async def close(self) -> None:
        """Close all connections; idempotent."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _find_unresponsive(self, expected_agents: Collection[str]) -> tuple[str, ...]:
        self._servers = await discover(self._session(), self._head_url)
        for agent in expected_agents:
            if agent not in self._servers.agents:
                problem = "the stack has no such agent"
                raise ConfigError(f"{self._key}: agent_ref.name", agent, problem, known=self.known_agents)
        return await find_unresponsive_servers(self._session(), self._servers.required_by(expected_agents))

    async def _run(self, agent: str, row: Mapping[str, Any]) -> GymReply:
        attempts = self._section.max_retries + 1
        for attempt in range(attempts):
            try:
                return await self._post(agent, row)
            except _RowNotAccepted as error:
                if attempt + 1 == attempts:
                    raise error.to_unavailable(agent, self._url(agent), attempts) from error
                logger.warning("retrying agent %r at %s: %s", agent, self._url(agent), error)
            await asyncio.sleep(min(self._section.retry_backoff_s * 2**attempt, MAX_BACKOFF_S))
            await self._rediscover()
        raise AssertionError("unreachable")

    async def _post(self, agent: str, row: Mapping[str, Any]) -> GymReply:
        url = f"{self._url(agent)}/run"
        try:
            async with self._session().post(url, json=row, allow_redirects=False) as response:
                status, body = response.status, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise _RowNotAccepted(describe_error(error)) from error
        except CONNECTION_ERRORS as error:
            raise GymUnavailable(f"connection lost ({describe_error(error)})", agent=agent, url=url) from error
        if status in RETRYABLE_STATUSES:
            raise _RowNotAccepted(f"HTTP {status}: {_error_text(body)}")
        if status in GATEWAY_STATUSES:
            raise GymUnavailable(f"HTTP {status}: {_error_text(body)}", agent=agent, url=url)
        if status != 200:
            raise GymRefused(f"HTTP {status}: {_error_text(body)}", agent=agent, url=url)
        try:
            return parse_reply(json.loads(body))
        except GymInvalidReply as error:
            raise GymInvalidReply(error.problem, agent=agent, url=url) from error
        except ValueError as error:  # json's own
            raise GymInvalidReply(f"the reply is not JSON ({describe_error(error)})", agent=agent, url=url) from error

    async def _rediscover(self) -> None:
        """Refresh the addresses after a failure; keep the old ones if the head server does not respond."""
        try:
            self._servers = await discover(self._session(), self._head_url)
        except GymError as error:
            logger.warning("cannot rediscover NeMo Gym's servers: %s", error)

    def _url(self, agent: str) -> str:
        urls = self._servers.agents
        if agent not in urls:
            problem = "the stack has no such agent" if urls else "not connected to the stack"
            raise GymRefused(f"{problem}; known: {', '.join(self.known_agents)}", agent=agent, url=self._head_url)
        return urls[agent]

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # A server may close a kept connection just when it is reused, and it is then unknown whether the row was
            # started. Rollouts take seconds, a new connection a fraction of a millisecond.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._http = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._http


class _RowNotAccepted(Exception):
    """No server has started the row."""

    def to_unavailable(self, agent: str, url: str, attempts: int) -> GymUnavailable:
        return GymUnavailable(f"not accepted in {attempts} attempts ({self})", agent=agent, url=url)


async def discover(http: aiohttp.ClientSession, head_url: str) -> GymServers:
    """Return the servers that the head server lists; raises GymUnavailable, or GymInvalidReply for another server."""
    url = f"{head_url}/global_config_dict_yaml"
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as response:
            body, status = await response.read(), response.status
    except CONNECTION_ERRORS as error:
        raise GymUnavailable(f"the head server does not respond ({describe_error(error)})", url=url) from error
    if status in (502, 503, 504):
        raise GymUnavailable(f"the head server does not respond (HTTP {status})", url=url)
    if status != 200:
        raise GymInvalidReply(f"not a head server of NeMo Gym: HTTP {status}", url=url)
    try:
        config = OmegaConf.to_container(OmegaConf.create(json.loads(body)), resolve=False)
    except (ValueError, TypeError, OmegaConfBaseException, YAMLError) as error:
        raise GymInvalidReply(f"not a head server of NeMo Gym: {describe_error(error)}", url=url) from error
    if not isinstance(config, dict):
        raise GymInvalidReply("not a head server of NeMo Gym: its configuration is no mapping", url=url)
    return parse_servers(config, head_host=urlsplit(head_url).hostname or "127.0.0.1")


def parse_servers(config: Mapping[Any, Any], *, head_host: str) -> GymServers:
    """Return the servers of Gym's configuration: entries `<name>: {<kind>: {<implementation>: {host, port, ...}}}`."""
    servers: dict[str, GymServer] = {}
    for name, entry in config.items():
        kind = next((kind for kind in SERVER_KINDS if isinstance(entry, Mapping) and kind in entry), None)
        if kind is None or not isinstance(entry[kind], Mapping):
            continue
        settings = next(iter(entry[kind].values()), None)
        if not isinstance(settings, Mapping) or not settings.get("host") or not settings.get("port"):
            continue
        host = head_host if settings["host"] in ANY_ADDRESS else str(settings["host"])
        url = f"http://{f'[{host}]' if ':' in host else host}:{settings['port']}"
        servers[str(name)] = GymServer(str(name), kind, url, tuple(sorted(set(_iter_server_references(settings)))))
    return GymServers(servers)


async def find_unresponsive_servers(http: aiohttp.ClientSession, servers: Collection[GymServer]) -> tuple[str, ...]:
    """Return those servers that do not respond, as "name (address)"."""
    are_responding = await asyncio.gather(*(_is_responding(http, server.url) for server in servers))
    return tuple(f"{s.name} ({s.url})" for s, responds in zip(servers, are_responding, strict=True) if not responds)


def describe_error(error: BaseException) -> str:
    """Return the error in a few words; timeouts have no text of their own."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _iter_server_references(value: Any) -> Iterator[str]:
    """Yield the names in all `{type: <kind>, name: <server>}` below a server's settings."""
    if isinstance(value, Mapping):
        if value.get("type") in SERVER_KINDS and isinstance(value.get("name"), str):
            yield value["name"]
        for inner in value.values():
            yield from _iter_server_references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _iter_server_references(inner)


async def _is_responding(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a server responds; it need not have a page at /."""
    try:
        async with http.get(f"{url}/", timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as response:
            return response.status not in (502, 503, 504)
    except CONNECTION_ERRORS:
        return False


def _error_text(body: bytes) -> str:
    """Return the text of a response on one line; Gym answers 500 with a JSON string."""
    text = body.decode(errors="replace")
    try:
        said = json.loads(text)
        text = said if isinstance(said, str) else text
    except ValueError:
        pass
    return " ".join(text.split())[:MAX_ERROR_TEXT_CHARACTERS] or "no text"
