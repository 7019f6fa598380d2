"""Where a stack's servers listen: read from its head server, which knows the configuration of all of them."""

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_rl.config.nemo_gym import SERVER_KINDS
from nemo_rl.environments.nemo_gym.errors import GymBrokenReply, GymUnavailable

ASK_TIMEOUT_S = 10.0  # of one question to the head server, or to a server whether it is there
ANY_ADDRESS = ("0.0.0.0", "::")
NO_CONNECTION = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class GymServer:
    """One server of a stack."""

    name: str
    kind: str  # one of SERVER_KINDS
    url: str
    needs: tuple[str, ...]  # the servers that it calls


@dataclass(frozen=True, slots=True)
class GymServers:
    """All servers of a stack by name."""

    by_name: Mapping[str, GymServer]

    @property
    def agents(self) -> dict[str, str]:
        """Addresses of the agents by name."""
        return {name: server.url for name, server in self.by_name.items() if server.kind == SERVER_KINDS[0]}

    def behind(self, agents: Collection[str]) -> tuple[GymServer, ...]:
        """These agents and all servers that they need, directly or not, in order of their names."""
        found: set[str] = set()
        waiting = [name for name in agents if name in self.by_name]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [needed for needed in self.by_name[name].needs if needed in self.by_name]
        return tuple(self.by_name[name] for name in sorted(found))


async def discover(http: aiohttp.ClientSession, head_url: str) -> GymServers:
    """Ask the head server. Raises GymUnavailable where nobody answers, GymBrokenReply where it is no head server."""
    url = f"{head_url}/global_config_dict_yaml"
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)) as response:
            body, status = await response.read(), response.status
    except NO_CONNECTION as error:
        raise GymUnavailable(f"the head server does not answer ({reason(error)})", url=url) from error
    if status in (502, 503, 504):
        raise GymUnavailable(f"the head server does not answer (HTTP {status})", url=url)
    if status != 200:
        raise GymBrokenReply(f"no head server of NeMo Gym: HTTP {status}", url=url)
    try:
        config = OmegaConf.to_container(OmegaConf.create(json.loads(body)), resolve=False)
    except (ValueError, TypeError, OmegaConfBaseException, YAMLError) as error:
        raise GymBrokenReply(f"no head server of NeMo Gym: {reason(error)}", url=url) from error
    if not isinstance(config, dict):
        raise GymBrokenReply("no head server of NeMo Gym: its configuration is no mapping", url=url)
    return parse_servers(config, head_host=urlsplit(head_url).hostname or "127.0.0.1")


def parse_servers(config: Mapping[Any, Any], *, head_host: str) -> GymServers:
    """The servers in Gym's configuration: entries `<name>: {<kind>: {<implementation>: {host, port, ...}}}`."""
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
        servers[str(name)] = GymServer(str(name), kind, url, tuple(sorted(set(_references(settings)))))
    return GymServers(servers)


async def silent_servers(http: aiohttp.ClientSession, servers: Collection[GymServer]) -> tuple[str, ...]:
    """Of these servers those that do not answer, as "name (address)"."""
    answers = await asyncio.gather(*(_answers(http, server.url) for server in servers))
    return tuple(f"{s.name} ({s.url})" for s, is_present in zip(servers, answers, strict=True) if not is_present)


def reason(error: BaseException) -> str:
    """Why nobody answered, in a few words; timeouts have no text of their own."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _references(value: Any) -> Iterator[str]:
    """The names in all `{type: <kind>, name: <server>}` below a server's settings."""
    if isinstance(value, Mapping):
        if value.get("type") in SERVER_KINDS and isinstance(value.get("name"), str):
            yield value["name"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether anybody is there; a server need not have a page at /."""
    try:
        async with http.get(f"{url}/", timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)) as response:
            return response.status not in (502, 503, 504)
    except NO_CONNECTION:
        return False
