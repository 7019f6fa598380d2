"""`nemo-rl route`: one address for several OpenAI-compatible servers; each request goes to the least busy.

In a Slurm job it runs between the collection and servers that do not balance load themselves. A member's answer is
streamed through. A request to a member that cannot be reached goes to another one.
"""

import argparse
import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from nemo_rl.commands import Command, ExitCode
from nemo_rl.distributed.load_balancer import LoadBalancer
from nemo_rl.distributed.machine import max_connections, raise_file_limit
from nemo_rl.web import Guard, Refused, accept, open_listener, read_body

CONNECT_S = 10.0
BODY_TIMEOUT_S = 60.0
# RFC 9110, section 7.6.1, and the host of the next server.
HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailers", "transfer-encoding", "upgrade", "host"})

logger = logging.getLogger(__name__)


class Router:
    """Forwards requests to members, given as "host:port". Made by `start`, ended by `close`."""

    def __init__(self, members: Sequence[str]) -> None:
        """Use `start`."""
        self._load_balancer = LoadBalancer(members)
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Server | None = None
        self._client: aiohttp.ClientSession | None = None

    @classmethod
    async def start(cls, members: Sequence[str], *, host: str = "127.0.0.1", port: int = 0) -> "Router":
        """Start a router, which listens on return; port 0: a free one. Raises ConfigError where it cannot be bound."""
        router = cls(members)
        await router._listen(host, port)
        return router

    @property
    def load(self) -> dict[str, int]:
        """Return the number of requests that each member has now."""
        return self._load_balancer.load

    async def close(self) -> None:
        """Stop listening; requests in flight are cancelled."""
        if self._accepting is not None:
            self._accepting.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._client is not None:
            await self._client.close()

    async def _listen(self, host: str, port: int) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_S)
        # Connections are not kept: a server that hangs up an idle one would fail the next request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._client = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        guard = Guard(host, public_paths=("/health",))
        app = web.Application(client_max_size=2**40, middlewares=[guard.middleware])
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        assert self._runner.server is not None  # setup made it
        listener = open_listener(host, port, key="--host, --port")
        self.port = listener.getsockname()[1]
        limit = max_connections(raise_file_limit())
        self._accepting = await accept(self._runner.server, listener, max_connections=limit)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"members": self.load})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Forward to the least busy member, among equals the first; to another where it cannot be reached."""
        try:
            body = await read_body(request, BODY_TIMEOUT_S)
        except Refused as error:
            return _error(error.status, str(error))
        causes: dict[str, str] = {}
        while len(causes) < len(self._load_balancer.members):
            with self._load_balancer.lease(avoid=causes) as member:
                try:
                    return await self._proxy(member, request, body)
                except aiohttp.ClientConnectorError as error:
                    logger.warning("cannot reach %s: %s", member, error)
                    causes[member] = f"{member}: {error}"
                except aiohttp.ClientError as error:  # it may have begun to answer, so no other member is asked
                    return _error(502, f"{member} did not answer as it should: {error}")
        return _error(503, f"no server can be reached: {'; '.join(causes.values())}")

    async def _proxy(self, member: str, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._client is not None  # made before the router listens
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = URL(f"http://{member}{request.raw_path}", encoded=True)
        async with self._client.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "router_error", "code": status}}, status=status)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("members", nargs="+", metavar="HOST:PORT", help="servers that answer OpenAI's API")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--address-file", type=Path, help='gets "HOST PORT" once it listens')


def _run(parsed: argparse.Namespace) -> ExitCode:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    raise_file_limit()
    asyncio.run(_serve(parsed))
    return ExitCode.DONE


ROUTE = Command(
    (__doc__ or "").split("\n\n")[0], _add_arguments, _run, program="nemo-rl route", reported_errors=(OSError,)
)


async def _serve(parsed: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    router = await Router.start(parsed.members, host=parsed.host, port=parsed.port)
    try:
        logger.info("routing %s:%d to %s", parsed.host, router.port, ", ".join(parsed.members))
        if parsed.address_file is not None:
            await asyncio.to_thread(_publish, parsed.address_file, f"{parsed.host} {router.port}\n")
        await ended.wait()
    finally:
        await router.close()


def _publish(path: Path, text: str) -> None:
    """Write the whole file atomically, for the job script that waits for it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)
