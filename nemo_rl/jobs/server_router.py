"""`nemo-rl route`: one address for several OpenAI-compatible servers; each request goes to the least busy.

In a Slurm job it runs between the collection and servers that do not balance load themselves. A member's answer is
streamed through. A request to a member that cannot be reached goes to another one.
"""

import argparse
import asyncio
import logging
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from nemo_rl.command_line import Command, ExitCode, path_argument, text_argument
from nemo_rl.distributed.load_balancer import LoadBalancer
from nemo_rl.distributed.machine import max_connections, raise_file_limit
from nemo_rl.errors import escape
from nemo_rl.web import MAX_PORT, Guard, Refused, accept, open_listener, read_body

CONNECT_S = 10.0
BODY_TIMEOUT_S = 60.0
MAX_BODY_BYTES = 64 * 1024 * 1024  # kept in memory while members are tried
MEMBER_HOST = re.compile(r"\[[0-9A-Fa-f:.%]+\]|[\w.-]+")  # an IPv6 address in brackets, or a name
# RFC 9110, section 7.6.1, and the host of the next server.
HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailers", "transfer-encoding", "upgrade", "host"})
OF_THE_BODY = frozenset({"content-length", "content-encoding"})  # the body is forwarded decompressed

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
        """Start a router, which listens on return; port 0: a free one. Raises ConfigError if it cannot be bound."""
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
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard.middleware])
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
        """Forward to the least busy member, among equals the first; to another one if it cannot be reached."""
        try:
            target = _target(request)
            body = await read_body(request, BODY_TIMEOUT_S)
        except Refused as error:
            return _error(error.status, str(error))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body of the request is larger than {MAX_BODY_BYTES} bytes, the router's limit")
        causes: dict[str, str] = {}
        while len(causes) < len(self._load_balancer.members):
            with self._load_balancer.lease(avoid=causes) as member:
                try:
                    return await self._proxy(member, request, target, body)
                except aiohttp.ClientConnectorError as error:
                    logger.warning("cannot reach %s: %s", member, error)
                    causes[member] = f"{member}: {error}"
                except aiohttp.ClientError as error:  # it may have begun to answer: do not retry elsewhere
                    return _error(502, f"{member} did not answer as it should: {error}")
        return _error(503, f"no server can be reached: {'; '.join(causes.values())}")

    async def _proxy(self, member: str, request: web.Request, target: str, body: bytes) -> web.StreamResponse:
        assert self._client is not None  # made before the router listens
        dropped = HOP_BY_HOP | OF_THE_BODY
        headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
        url = URL(f"http://{member}{target}", encoded=True)
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


def _target(request: web.Request) -> str:
    """Return path and query of a request, as sent (RFC 9112, section 3.2); raises Refused if it has no path.

    Of an absolute form ("GET http://host/path") the path alone counts: this is the server that it reached.
    """
    target = request.raw_path
    if not target.startswith("/"):
        scheme, separator, rest = target.partition("://")
        if not separator or scheme.lower() not in ("http", "https"):
            raise Refused(400, f"the target {escape(target)!r} is neither a path nor an http URL", code="bad_target")
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
        target = rest.removeprefix(authority)
    target = target.partition("#")[0]
    return target if target.startswith("/") else f"/{target}"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "router_error", "code": status}}, status=status)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "members",
        nargs="+",
        type=text_argument(parse_member),
        metavar="HOST:PORT",
        help="servers that answer OpenAI's API",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--address-file", type=path_argument, help='file to write "HOST PORT" to once it listens')


def parse_member(text: str) -> str:
    """Return the address of a member, as it is; raises ValueError unless it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not MEMBER_HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"{text!r} is no HOST:PORT; allowed: such as 127.0.0.1:8000, with a port from 1 to {MAX_PORT}")
    return text


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
