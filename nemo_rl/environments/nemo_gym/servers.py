"""The servers of a NeMo Gym stack: their addresses, as the head server lists them, and whether they respond."""

import asyncio
import errno
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl.environments.nemo_gym.configuration import AGENT_SERVERS, ENVIRONMENT_SERVERS, SERVER_KINDS
from nemo_rl.environments.nemo_gym.protocols import (
    AGENT_PROTOCOL,
    EPISODE_PROTOCOL,
    PROTOCOL_OF_ENVIRONMENT_SERVER,
    RunProtocol,
)
from nemo_rl.environments.nemo_gym.reply import GymInvalidReply, GymUnavailable

REQUEST_TIMEOUT_S = 10.0  # per request to the head server, or probe of a server
ANY_ADDRESS = ("0.0.0.0", "::")
ROUTES_KEY = "environment_server_routes"  # Gym's own: environment servers by taskset
STACK_ID_KEY = "nemo_rl_stack_id"  # a key in the configuration of a stack that the run started
CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError, OSError)
GATEWAY_STATUSES = (502, 503, 504)


@dataclass(frozen=True, slots=True)
class GymServer:
    name: str
    kind: str  # one of SERVER_KINDS
    url: str
    needs: tuple[str, ...]  # names of the servers that it calls
    implementation: str = ""  # directory of its code in Gym
    fronted_agents: tuple[str, ...] = ()  # agents that an environment server runs rows of

    @property
    def protocol(self) -> RunProtocol:
        """Return the form in which it takes rows, if it runs any."""
        if self.kind != ENVIRONMENT_SERVERS:
            return AGENT_PROTOCOL
        return PROTOCOL_OF_ENVIRONMENT_SERVER.get(self.implementation, EPISODE_PROTOCOL)


@dataclass(frozen=True, slots=True)
class GymServers:
    """The servers of a stack by name."""

    by_name: Mapping[str, GymServer]
    routes: Mapping[str, str] = field(default_factory=dict)  # names of environment servers by taskset

    @property
    def runners(self) -> dict[str, GymServer]:
        """Return the servers that run rows, by the names that rows give: of agents, environment servers, tasksets.

        An agent's rows go to the environment server that fronts it; to the agent itself if none does, as in stacks up
        to nemo-gym 0.6. An agent with several has no route of its own: its rows name one of them.
        """
        fronts = [server for server in self.by_name.values() if server.kind == ENVIRONMENT_SERVERS]
        runners = {taskset: self.by_name[name] for taskset, name in self.routes.items() if name in self.by_name}
        runners |= {server.name: server for server in fronts}
        for name, server in self.by_name.items():
            if server.kind == AGENT_SERVERS:
                candidates = [front for front in fronts if name in front.fronted_agents] or [server]
                if len(candidates) == 1:
                    runners[name] = candidates[0]
        return runners

    def required_by(self, agents: Collection[str]) -> tuple[GymServer, ...]:
        """Return the servers that run these agents' rows and all that they need, ordered by name."""
        found: set[str] = set()
        runners = self.runners
        pending = [runners[name].name for name in agents if name in runners]
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += [needed for needed in self.by_name[name].needs if needed in self.by_name]
        return tuple(self.by_name[name] for name in sorted(found))


def open_connections() -> aiohttp.ClientSession:
    """Return a session for requests to a stack, each on a connection of its own and without a deadline of its own.

    A server may close a kept connection just when it is reused, and it is then unknown whether the row was started.
    Rollouts take seconds, a new connection a fraction of a millisecond.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    no_limit = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=no_limit, cookie_jar=aiohttp.DummyCookieJar())


async def discover(http: aiohttp.ClientSession, head_url: str, *, stack_id: str | None = None) -> GymServers:
    """Return the servers that the head server lists.

    Raises GymUnavailable, or GymInvalidReply for another kind of server and, with a `stack_id`, for another stack's.
    """
    url = f"{head_url}/global_config_dict_yaml"
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as response:
            body, status = await response.read(), response.status
    except CONNECTION_ERRORS as error:
        raise GymUnavailable(f"the head server does not respond ({describe_error(error)})", url=url) from error
    if status in GATEWAY_STATUSES:
        raise GymUnavailable(f"the head server does not respond (HTTP {status})", url=url)
    if status != 200:
        raise GymInvalidReply(f"not a head server of NeMo Gym: HTTP {status}", url=url)
    try:
        config = OmegaConf.to_container(OmegaConf.create(json.loads(body)), resolve=False)
    except (ValueError, TypeError, OmegaConfBaseException, YAMLError) as error:
        raise GymInvalidReply(f"not a head server of NeMo Gym: {describe_error(error)}", url=url) from error
    if not isinstance(config, dict):
        raise GymInvalidReply("not a head server of NeMo Gym: its configuration is no mapping", url=url)
    if stack_id is not None and config.get(STACK_ID_KEY) != stack_id:
        raise GymInvalidReply(
            "the head server of another stack listens there; choose another head_server.port", url=url
        )
    return parse_servers(config, head_host=urlsplit(head_url).hostname or "127.0.0.1")


def parse_servers(config: Mapping[Any, Any], *, head_host: str) -> GymServers:
    """Return the servers of Gym's configuration: entries `<name>: {<kind>: {<implementation>: {host, port, ...}}}`."""
    servers: dict[str, GymServer] = {}
    for name, entry in config.items():
        kind = next((kind for kind in SERVER_KINDS if isinstance(entry, Mapping) and kind in entry), None)
        if kind is None or not isinstance(entry[kind], Mapping):
            continue
        implementation, settings = next(iter(entry[kind].items()), ("", None))
        if not isinstance(settings, Mapping) or not settings.get("host") or not settings.get("port"):
            continue
        host = head_host if settings["host"] in ANY_ADDRESS else str(settings["host"])
        url = f"http://{f'[{host}]' if ':' in host else host}:{settings['port']}"
        needs = tuple(sorted(set(_iter_server_references(settings))))
        fronted = tuple(_iter_fronted_agents(settings)) if kind == ENVIRONMENT_SERVERS else ()
        servers[str(name)] = GymServer(str(name), kind, url, needs, str(implementation), fronted)
    routes = config.get(ROUTES_KEY)
    return GymServers(servers, routes if isinstance(routes, Mapping) else {})


class ProbeResult(Enum):
    """The outcome of one request to a server."""

    RESPONDS = "responds"
    REFUSED = "refused"  # no process listens at its address
    SILENT = "silent"  # no response in time, a lost connection, or a proxy's error


async def probe(http: aiohttp.ClientSession, url: str, timeout_s: float = REQUEST_TIMEOUT_S) -> ProbeResult:
    """Request the server's page at /, which it need not have."""
    try:
        async with http.get(f"{url}/", timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            return ProbeResult.SILENT if response.status in GATEWAY_STATUSES else ProbeResult.RESPONDS
    except aiohttp.ClientConnectorError as error:
        is_refused = error.os_error.errno == errno.ECONNREFUSED
        return ProbeResult.REFUSED if is_refused else ProbeResult.SILENT
    except CONNECTION_ERRORS:
        return ProbeResult.SILENT


async def find_unresponsive_servers(http: aiohttp.ClientSession, servers: Collection[GymServer]) -> tuple[str, ...]:
    """Return those servers that do not respond, as "name (address)"."""
    results = await asyncio.gather(*(probe(http, server.url) for server in servers))
    return tuple(
        f"{server.name} ({server.url})"
        for server, result in zip(servers, results, strict=True)
        if result is not ProbeResult.RESPONDS
    )


def describe_error(error: BaseException) -> str:
    """Return the error in a few words; timeouts have no text of their own."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _iter_fronted_agents(settings: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the agents in the fields of an environment server; `agent_server` may omit its type."""
    for key, value in settings.items():
        if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
            continue
        if value.get("type", AGENT_SERVERS if key == "agent_server" else None) == AGENT_SERVERS:
            yield name


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
