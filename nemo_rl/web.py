"""The guard that all HTTP servers of ours share, on aiohttp: who may ask, deadlines of connections, and the listener.

    guard = Guard(host, token=token, allowed_hosts=["proxy.example"])   # or make_token() where is_exposed(host)
    app = web.Application(middlewares=[guard.middleware])
    listening = await accept(runner.server, open_listener(host, port), max_connections=1024)

A page in a browser on this machine reaches a server on localhost as well, and by DNS rebinding even under its own name
(https://en.wikipedia.org/wiki/DNS_rebinding). So the Host header must name this server, and an Origin header, which
only browsers send, must be the server's own. Clients may hold a token instead of being on this machine: as a bearer
token, or in a cookie that `?token=...` sets, for browsers.
"""

import asyncio
import hmac
import ipaddress
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from nemo_rl.errors import ConfigError, escape

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BACKLOG = 1024  # connections that wait to be accepted
HEADERS_TIMEOUT_S = 30.0  # from the first byte of a request, or of a connection, to the end of its headers
IDLE_TIMEOUT_S = 120.0  # of a connection between two requests; clients keep theirs for seconds


class Refused(Exception):
    """A request that may not come in: its HTTP status, a code for programs and a text for people."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Guard:
    """Decides which requests a server answers: by their Host, their Origin and their token."""

    def __init__(
        self,
        host: str,
        *,
        token: str | None = None,
        allowed_hosts: Iterable[str] = (),
        public_paths: Iterable[str] = (),
        cookie: str | None = None,
        loopback_only: bool = False,
        knows_key: Callable[[str], bool] | None = None,
    ) -> None:
        """`host` is the address that the server binds; `public_paths` need no token.

        A Host header may be an IP address, localhost, `host`, a name of this machine, or one of `allowed_hosts`; with
        `loopback_only` a loopback address or localhost. `cookie` begins the name of the cookie in which a browser keeps
        the token, and whose name ends with the port; None: only headers count. `knows_key` accepts other API keys than
        the token.
        """
        names = (host, "localhost", socket.gethostname(), socket.gethostname().partition(".")[0], *allowed_hosts)
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self.token = token
        self._public_paths = frozenset(public_paths)
        self._cookie = cookie
        self._loopback_only = loopback_only
        self._knows_key = knows_key

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a refused request with {"error": {"message", "code"}}; servers with another envelope call `check`."""
        try:
            self.check(request)
        except Refused as error:
            body = {"error": {"message": str(error), "code": error.code}}
            return web.json_response(body, status=error.status)
        return self.move_token_to_cookie(request) or await handler(request)

    def check(self, request: web.Request) -> None:
        """Raise Refused for a request that may not come in; call it first, since it ends the wait for headers."""
        if isinstance(request.protocol, Connection):
            request.protocol.end_headers()
        host = request.headers.get("Host", "")
        if not self.knows(host):
            message = f"the Host header {escape(host)!r} does not name this server"
            raise Refused(403, message, code="unknown_host")
        for origin in request.headers.getall("Origin", []):
            if origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
                raise Refused(403, f"requests from pages of {escape(origin)!r} are not answered", code="foreign_origin")
        if self.token is not None and request.path not in self._public_paths and not self._has_token(request):
            raise Refused(401, "this server needs its token as the API key", code="invalid_api_key")

    def knows(self, host: str) -> bool:
        """Return whether a Host header names this server: no IP address is a name that somebody else could rebind."""
        name, _ = _split_port(host)
        name = name.lower().rstrip(".")
        if self._loopback_only:
            return not is_exposed(name.strip("[]"))
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        return True

    def move_token_to_cookie(self, request: web.Request) -> web.Response | None:
        """Return a redirect to the address without its token, which becomes a cookie; None for an address without one.

        A link to a page then does not carry the token. Call it for requests that `check` has let in.
        """
        if self._cookie is None or self.token is None or "token" not in request.query:
            return None
        path = "/" + str(request.rel_url.without_query_params("token")).lstrip("/")  # "//a" would be another server's
        response = web.Response(status=303, headers={"Location": path})
        response.set_cookie(self._cookie_name(request), self.token, httponly=True, samesite="Strict", path="/")
        return response

    def _cookie_name(self, request: web.Request) -> str:
        """Return a name of its own for each port: browsers send a cookie to all ports of a host."""
        return f"{self._cookie}-{_split_port(request.headers.get('Host', ''))[1] or 80}"

    def _has_token(self, request: web.Request) -> bool:
        given = api_keys(request)
        if self._knows_key is not None and any(map(self._knows_key, given)):
            return True
        if self._cookie:
            given += [request.cookies.get(self._cookie_name(request), ""), request.query.get("token", "")]
        expected = (self.token or "").encode()
        return any(hmac.compare_digest(one.encode("utf-8", "replace"), expected) for one in given)


def api_keys(request: web.Request) -> list[str]:
    """Return the API keys of a request: a bearer token's, and those of Anthropic's and Google's clients."""
    headers = request.headers
    keys = [headers.get(name, "") for name in ("Authorization", "X-API-Key", "X-Goog-API-Key")]
    return [keys[0].removeprefix("Bearer "), *keys[1:], *request.query.getall("key", [])]


def make_token() -> str:
    """Return a new token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def is_exposed(host: str) -> bool:
    """Return whether other machines reach a server that binds this address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """Return the body of a request; raises Refused where it is broken off or does not arrive in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise Refused(408, "the body of the request did not arrive in time", code="slow_body") from error
    except web.RequestPayloadError as error:
        raise Refused(400, "the body of the request is not what its headers say", code="broken_body") from error


def open_listener(host: str, port: int, *, key: str) -> socket.socket:
    """Return a socket that listens at an address; port 0: a free one. `key` is the setting that errors name.

    Raises ConfigError for a host that does not resolve, and for an address that cannot be bound.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:  # UnicodeError: no name at all
        problem = "does not resolve" if isinstance(error, socket.gaierror | UnicodeError) else "cannot be bound"
        reason = getattr(error, "strerror", None) or error
        text = f"{problem}: {reason}; allowed: an address of this machine, such as 127.0.0.1, and a free port (0: any)"
        raise ConfigError(key, f"{host}:{port}", text) from error


async def accept(
    server: web.Server,
    listener: socket.socket,
    *,
    max_connections: int,
    headers_timeout_s: float = HEADERS_TIMEOUT_S,
) -> asyncio.Server:
    """Serve connections to `listener`, and close those beyond `max_connections` at once, for clients to retry.

    Without the limit the process would run out of file descriptors, wherever it opens the next file. A connection whose
    request has no end of headers in `headers_timeout_s` is closed too.
    """
    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.BaseProtocol:
        if len(server.connections) >= max_connections:
            return _ConnectionRejector()
        settings = {"loop": loop, "access_log": None, "keepalive_timeout": IDLE_TIMEOUT_S}
        return Connection(server, headers_timeout_s=headers_timeout_s, **settings)

    return await loop.create_server(protocol, sock=listener, backlog=BACKLOG)


class Connection(web.RequestHandler):
    """A client's connection, closed where the headers of a request do not arrive in time."""

    __slots__ = ("_headers_timeout_s", "_timer", "_waits")

    def __init__(self, manager: web.Server, *, headers_timeout_s: float, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._headers_timeout_s = headers_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._waits = True  # for the first request, or for the next one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._begin_headers()

    def data_received(self, data: bytes) -> None:
        self._begin_headers()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def end_headers(self) -> None:
        """Stop the timer; it starts with the first byte that follows this request's answer."""
        self._stop_timer()
        self._waits = False

    async def finish_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().finish_response(*args, **kwargs)
        finally:
            self._waits = True

    def _begin_headers(self) -> None:
        if self._waits and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._headers_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.transport is not None:
            logger.debug("closed connection from %s: no headers", self.transport.get_extra_info("peername"))
            self.transport.abort()


class _ConnectionRejector(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        logger.warning("closed connection from %s: too many connections", transport.get_extra_info("peername"))
        transport.close()


def _split_port(host: str) -> tuple[str, str]:
    """Return the name of a Host header, an IPv6 address with its brackets, and its port or an empty text."""
    if host.startswith("["):
        name, _, rest = host.partition("]")
        return f"{name}]", rest.removeprefix(":")
    name, _, port = host.rpartition(":") if ":" in host else (host, "", "")
    return name, port
