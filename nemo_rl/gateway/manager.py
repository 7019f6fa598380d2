"""The gateway of a run: several servers for one engine; a new session opens on the server with the fewest.

A session stays on its server, whose address is its base URL. Its requests carry its id, so that an engine with several
replicas keeps them on one. Sessions end in many ways (a finished rollout, a failure, their time to live, a client's
DELETE), so only the servers count them.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.distributed.cluster import node_ip
from nemo_rl.distributed.machine import files_for_connections, max_connections, raise_file_limit
from nemo_rl.errors import ConfigError
from nemo_rl.gateway.captures import CaptureSnapshot
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.echoes import Claim, build_chains, resolve_claims
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.server import GatewayServer, ServerSettings, read_token
from nemo_rl.gateway.sessions import CallFailure, Chain
from nemo_rl.gateway.side_calls import SideCallTest
from nemo_rl.interfaces import Generation
from nemo_rl.types import SamplingParams

ALL_ADDRESSES = "0.0.0.0"
MIB = 2**20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """An open session: its id, and the address and key for an agent.

    The id is the key, which opens calls in this session and nothing else.
    """

    id: str = field(repr=False)
    base_url: str = field(repr=False)  # OPENAI_BASE_URL; ends in /v1
    api_key: str = field(repr=False)  # OPENAI_API_KEY
    server: int = 0  # index of its server


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """The record of an agent's run."""

    chains: tuple[Chain, ...]  # to train on, in order of last calls; empty if no call succeeded
    rewards: Mapping[str, float]  # posted for the whole run, by name; `Chain.rewards` has those for one chain
    last_failure: CallFailure | None = None  # None if the last call was answered or failed by the agent's fault


class GatewayManager:
    """Opens and closes sessions; created by `start`, ended by `close`, all in the engine's event loop."""

    def __init__(self, servers: Sequence[GatewayServer]) -> None:
        """Use `start`."""
        self._servers = tuple(servers)

    @classmethod
    async def start(
        cls, generation: Generation, codec: Codec, rules: CompletionRules, section: GatewayConfig
    ) -> "GatewayManager":
        """Start servers that listen on return, the first on `gateway.port`, the others on any free port.

        Raises ConfigError for a section that cannot be served, and for an address that cannot be bound.
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
        """Return the base URL of the first server, for clients without a session's address; ends in /v1."""
        return f"{self._servers[0].base_url}/v1"

    @property
    def api_key(self) -> str:
        """Return the run's key for `default_base_url`; agents never get it."""
        return self._servers[0].token

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
        is_side_call: SideCallTest | None = None,
    ) -> SessionHandle:
        """Open a session on `server`, or on the one with the fewest; raises RequestError 429 if that is full.

        `sampling` replaces the run's for all calls of this session. Clients that name their session in requests to
        `default_base_url` reach only the sessions of server 0.
        """
        index = server if server is not None else min(range(len(self._servers)), key=self.num_sessions.__getitem__)
        chosen = self._servers[index]
        session_id = chosen.open_session(seed=seed, sampling=sampling, trains=trains, is_side_call=is_side_call)
        return SessionHandle(session_id, chosen.session_url(session_id), session_id, index)

    def reward_calls(self, handle: SessionHandle, rewards: Mapping[str, Mapping[str, float]]) -> None:
        """Store rewards by name for the chains through each completion id; raises RequestError 404 or 409."""
        self._servers[handle.server].reward_calls(handle.id, rewards)

    async def finish(self, handle: SessionHandle) -> FinishedSession:
        """Close a session and return its record; running calls are cancelled and leave no trace.

        Raises RequestError 404 or 409 if it has already ended, for example by its time to live.
        """
        session = self._servers[handle.server].close_session(handle.id)
        return FinishedSession(session.chains(), dict(session.rewards), session.last_failure)

    async def finish_with_claims(self, handle: SessionHandle, claims: Sequence[Claim]) -> FinishedSession:
        """Close a session as `finish` does, keeping only the chains of the calls that a client reports.

        The calls are looked up in the session, then among those without one. Also raises UnknownEcho and
        LogprobMismatch; the session is closed all the same.
        """
        server = self._servers[handle.server]
        session = server.close_session(handle.id)
        calls = resolve_claims(claims, lambda echo: session.find(echo) or server.echoed.find(echo))
        for claim, call in zip(claims, calls, strict=True):
            if not session.find(claim.echo):
                server.echoed.forget(claim.echo, call)
        return FinishedSession(build_chains(calls), dict(session.rewards), session.last_failure)

    def take_capture(self, rollout_id: str) -> CaptureSnapshot | None:
        """Return and forget what clients of `default_base_url` captured of a rollout; None if nothing."""
        return self._servers[0].captures.take(rollout_id)

    def end_capture(self, rollout_id: str) -> None:
        """Forget what clients of `default_base_url` captured of a rollout that is over, all attempts included."""
        self._servers[0].captures.end(rollout_id)

    async def abandon(self, handle: SessionHandle) -> None:
        """Close a session and discard its record; does nothing if it has already ended."""
        with suppress(RequestError):
            self._servers[handle.server].close_session(handle.id)

    async def close(self) -> None:
        """End all sessions and stop listening. May be called twice."""
        await asyncio.gather(*(server.close() for server in self._servers))


def split_settings(section: GatewayConfig, max_connections: int) -> tuple[ServerSettings, ...]:
    """Split sessions and connections evenly over the servers; the first ones get the remainder.

    Sessions are limited to the number of connections, so that every agent can hold one. Raises ConfigError if there
    are fewer connections than servers.
    """
    if max_connections < section.num_servers:
        raise ConfigError("gateway.num_servers", section.num_servers, f"the open files allow {max_connections} servers")
    max_sessions = min(section.max_sessions, max_connections)
    if max_sessions < section.max_sessions:
        logger.warning(
            "gateway: limiting sessions to %d of %d, as many as the limit of open files carries; raise the hard limit "
            "to %d: ulimit -Hn, or LimitNOFILE of the service",
            max_sessions, section.max_sessions, files_for_connections(section.max_sessions),
        )  # fmt: skip
    totals = (max_sessions, section.max_client_sessions, max_connections)
    sessions, client_sessions, connections = (_split_evenly(total, section.num_servers) for total in totals)
    return tuple(
        ServerSettings(
            host=section.host,
            port=section.port if i == 0 else 0,
            advertised_host=node_ip() if section.host == ALL_ADDRESSES else None,
            token=read_token(section),
            allowed_hosts=tuple(section.allowed_hosts),
            max_sessions=sessions[i],
            max_client_sessions=client_sessions[i],
            max_connections=connections[i],
            images=section.images,
            max_captured_bytes=section.max_captured_mib * MIB,
            ttl_s=section.session_ttl_s,
        )
        for i in range(section.num_servers)
    )


def _split_evenly(total: int, num_servers: int) -> list[int]:
    """Split a number; the server with the fewest sessions is then full only if all are.

    Example: 5 over 3 servers is [2, 2, 1].
    """
    return [total // num_servers + (i < total % num_servers) for i in range(num_servers)]
