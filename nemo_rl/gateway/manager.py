"""The gateway of a run: several servers for one engine; a new session goes to the server with the fewest.

A session stays on its server, whose address is its base URL, and its requests carry its id, by which an engine of
several replicas keeps them on one. Sessions end in many ways (a finished rollout, a failure, their time to live, a
client's DELETE), so each server counts its own, and nothing else keeps a copy of that count.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from nemo_rl.config.run import GatewayConfig
from nemo_rl.distributed.cluster import node_ip
from nemo_rl.distributed.machine import max_connections, raise_file_limit
from nemo_rl.errors import ConfigError
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.echoes import Claim, build_chains, resolve_claims
from nemo_rl.gateway.schema import RequestError
from nemo_rl.gateway.server import GatewayServer, ServerSettings, read_token
from nemo_rl.gateway.sessions import CallFailure, Chain
from nemo_rl.interfaces import Generation
from nemo_rl.types import SamplingParams

PLACEHOLDER_API_KEY = "unused"  # clients insist on an API key, also where the server wants none
ALL_ADDRESSES = "0.0.0.0"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """An open session, and what an agent needs to use it."""

    id: str
    base_url: str  # OPENAI_BASE_URL; ends in /v1
    api_key: str = field(repr=False)  # OPENAI_API_KEY
    server: int = 0  # the index of its server


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """The record of an agent's run."""

    chains: tuple[Chain, ...]  # what to train on, in the order of their last calls; empty where no call went well
    rewards: Mapping[str, float]  # posted for the whole run, by name; those of one chain are the chain's
    last_failure: CallFailure | None = None  # of the last call; None: it was answered, or the agent's own mistake


class GatewayManager:
    """Opens and closes sessions. Created by `start`, ended by `close`; all calls in the event loop of the engine."""

    def __init__(self, servers: Sequence[GatewayServer]) -> None:
        """Use `start`."""
        self._servers = tuple(servers)

    @classmethod
    async def start(
        cls, generation: Generation, codec: Codec, rules: CompletionRules, section: GatewayConfig
    ) -> "GatewayManager":
        """Start servers, each on a free port unless `gateway.port` names that of the first; they listen on return.

        Raises ConfigError for a section that cannot be served and for an address that cannot be bound.
        """
        async with AsyncExitStack() as started:
            servers = []
            for settings in split_settings(section, max_connections(raise_file_limit())):
                servers.append(await GatewayServer.start(generation, codec, rules, settings))
                started.push_async_callback(servers[-1].close)
            started.pop_all()
        return cls(servers)

    @property
    def num_sessions(self) -> tuple[int, ...]:
        """Return the number of open sessions of each server."""
        return tuple(server.num_sessions for server in self._servers)

    @property
    def default_base_url(self) -> str:
        """Return the base URL for clients without a session's address: the first server, ends in /v1."""
        return f"{self._servers[0].base_url}/v1"

    @property
    def api_key(self) -> str:
        """Return the API key for `default_base_url`."""
        return self._servers[0].token or PLACEHOLDER_API_KEY

    @property
    def num_echoed_calls(self) -> int:
        """Return the number of stored calls without a session."""
        return sum(len(server.echoed) for server in self._servers)

    def open_session(
        self,
        *,
        seed: int,
        sampling: SamplingParams | None = None,
        server: int | None = None,
        trains: bool = True,
    ) -> SessionHandle:
        """Open a session on `server`, or on the one with the fewest; raises RequestError 429 when that is full.

        `sampling` replaces the run's for all calls of this session. Clients that name their session in their requests
        reach only those of server 0: `default_base_url`.
        """
        index = server if server is not None else min(range(len(self._servers)), key=self.num_sessions.__getitem__)
        return self._open_on(index, seed, sampling, trains)

    def _open_on(self, index: int, seed: int, sampling: SamplingParams | None, trains: bool) -> SessionHandle:
        server = self._servers[index]
        session_id = server.open_session(seed=seed, sampling=sampling, trains=trains)
        return SessionHandle(session_id, server.session_url(session_id), server.token or PLACEHOLDER_API_KEY, index)

    async def finish(self, handle: SessionHandle) -> FinishedSession:
        """Close a session and return its record; calls that still run are cancelled and leave no trace.

        Raises RequestError 404 or 409 for one that has ended already, by its time to live for instance.
        """
        session = self._servers[handle.server].close_session(handle.id)
        return FinishedSession(session.chains(), dict(session.rewards), session.last_failure)

    async def finish_with_claims(self, handle: SessionHandle, claims: Sequence[Claim]) -> FinishedSession:
        """Close a session as `finish` does, with only the chains of the calls that a client reports.

        They are searched in the session, then among the calls without one. Raises UnknownEcho and LogprobMismatch
        too; the session is closed then as well.
        """
        server = self._servers[handle.server]
        session = server.close_session(handle.id)
        calls = resolve_claims(claims, lambda echo: session.find(echo) or server.echoed.find(echo))
        for claim, call in zip(claims, calls, strict=True):
            server.echoed.forget(claim.echo, call)
        return FinishedSession(build_chains(calls), dict(session.rewards), session.last_failure)

    async def abandon(self, handle: SessionHandle) -> None:
        """Close a session and discard its record; does nothing where it has ended already."""
        with suppress(RequestError):
            self._servers[handle.server].close_session(handle.id)

    async def close(self) -> None:
        """End all sessions and stop listening. May be called twice."""
        await asyncio.gather(*(server.close() for server in self._servers))


def split_settings(section: GatewayConfig, max_connections: int) -> tuple[ServerSettings, ...]:
    """Split sessions and connections evenly over the servers; the first ones get the remainder.

    There are no more sessions than connections, so that every agent can hold one. Raises ConfigError for fewer
    connections than servers.
    """
    if max_connections < section.num_servers:
        raise ConfigError("gateway.num_servers", section.num_servers, f"the open files allow {max_connections} servers")
    max_sessions = min(section.max_sessions, max_connections)
    if max_sessions < section.max_sessions:
        logger.info(
            "limiting sessions to %d instead of %d: the limit on open files is low", max_sessions, section.max_sessions
        )
    sessions, connections = (_split_evenly(total, section.num_servers) for total in (max_sessions, max_connections))
    return tuple(
        ServerSettings(
            host=section.host,
            port=section.port if i == 0 else 0,
            advertised_host=node_ip() if section.host == ALL_ADDRESSES else None,
            token=read_token(section),
            allowed_hosts=tuple(section.allowed_hosts),
            max_sessions=sessions[i],
            max_connections=connections[i],
            ttl_s=section.session_ttl_s,
        )
        for i in range(section.num_servers)
    )


def _split_evenly(total: int, num_servers: int) -> list[int]:
    """Split a number; the server with the fewest sessions is then full only when all are.

    Example: 5 over 3 servers is [2, 2, 1].
    """
    return [total // num_servers + (i < total % num_servers) for i in range(num_servers)]
