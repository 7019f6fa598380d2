"""Access control, connection deadlines and the listener of all HTTP servers of this package, on aiohttp.

    guard = Guard(host, token=token, allowed_hosts=["proxy.example"])   # or make_token() if is_exposed(host)
    app = web.Application(middlewares=[guard.middleware])
    listening = await accept(runner.server, open_listener(host, port), max_connections=1024)

A web page in a browser on this machine can reach a server on localhost too, with DNS rebinding even under its own name
(https://en.wikipedia.org/wiki/DNS_rebinding). So the Host header must name this server, and an Origin header, which
only browsers send, must be the server's own. Clients elsewhere need a token: as a bearer token, or for browsers in a
cookie that `?token=...` sets.
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
from aiohttp.http import HttpProcessingError

from nemo_rl.errors import ConfigError, escape

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_PORT = 65_535
BACKLOG = 1024  # connections waiting to be accepted
HEADERS_TIMEOUT_S = 30.0  # time from the start of a connection or request to the end of the headers
MALFORMED = (HttpProcessingError, web.RequestPayloadError, ConnectionError)  # errors that a client causes
IDLE_TIMEOUT_S = 120.0  # between two requests of a connection; clients close theirs after seconds


class Refused(Exception):
    """A refused request: its HTTP status, a code for programs and a message for people."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Guard:
    """Decides which requests a server answers, by Host, Origin and token."""

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
        key_headers: Iterable[str] = (),
        key_parameters: Iterable[str] = (),
    ) -> None:
        """Guard a server that binds `host`; `public_paths` need no token.

        A Host header may be an IP address, localhost, `host`, a name of this machine, or one of `allowed_hosts`; with
        `loopback_only` only a loopback address or localhost. `cookie`: prefix, before the port, of the name of the
        cookie in which a browser keeps the token; None: no cookie. `knows_key` accepts API keys other than the token.
        `key_headers` and `key_parameters` (of the query) may carry an API key, besides `Authorization: Bearer`.
        """
        names = (host, "localhost", socket.gethostname(), socket.gethostname().partition(".")[0], *allowed_hosts)
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self.token = token
        self._public_paths = frozenset(public_paths)
        self._cookie = cookie
        self._loopback_only = loopback_only
        self._knows_key = knows_key
        self._key_headers = tuple(key_headers)
        self._key_parameters = tuple(key_parameters)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a refused request with {"error": {"message", "code"}}; servers with another envelope use `check`."""
        try:
            self.check(request)
        except Refused as error:
            body = {"error": {"message": str(error), "code": error.code}}
            return web.json_response(body, status=error.status)
        return self.move_token_to_cookie(request) or await handler(request)

    def check(self, request: web.Request) -> None:
        """Raise Refused for a request that is not allowed; call it first, since it ends the wait for headers."""
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
        """Return whether a Host header names this server; any IP address does, since only names can be rebound."""
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
        """Return a redirect that moves the token from the address to a cookie; None for an address without a token.

        Links from the page then do not carry the token. Call it for requests that `check` has passed.
        """
        if self._cookie is None or self.token is None or "token" not in request.query:
            return None
        path = "/" + str(request.rel_url.without_query_params("token")).lstrip("/")  # "//a" would be another server's
        response = web.Response(status=303, headers={"Location": path})
        response.set_cookie(self._cookie_name(request), self.token, httponly=True, samesite="Strict", path="/")
        return response

    def _cookie_name(self, request: web.Request) -> str:
        """Return the cookie's name, one per port: browsers send a cookie to all ports of a host."""
        return f"{self._cookie}-{_split_port(request.headers.get('Host', ''))[1] or 80}"

    def api_keys(self, request: web.Request) -> list[str]:
        """Return the API keys that a request may carry, some of them empty."""
        keys = [request.headers.get("Authorization", "").removeprefix("Bearer ")]
        keys += [request.headers.get(name, "") for name in self._key_headers]
        return keys + [key for name in self._key_parameters for key in request.query.getall(name, [])]

    def _has_token(self, request: web.Request) -> bool:
        given = self.api_keys(request)
        if self._knows_key is not None and any(map(self._knows_key, given)):
            return True
        if self._cookie:
            given += [request.cookies.get(self._cookie_name(request), ""), request.query.get("token", "")]
        return contains_key(given, self.token or "")


def contains_key(given: Iterable[str], expected: str) -> bool:
    """Return whether one of the given API keys is the expected one; each comparison takes constant time."""
    return any(hmac.compare_digest(one.encode("utf-8", "replace"), expected.encode()) for one in given)


def make_token() -> str:
    return secrets.token_urlsafe(32)


def is_exposed(host: str) -> bool:
    """Return whether other machines can reach a server that binds this address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """Return the body of a request; raises Refused if it breaks off or does not arrive in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise Refused(408, "the body of the request did not arrive in time", code="slow_body") from error
    except web.RequestPayloadError as error:
        raise Refused(400, "the body of the request does not match its headers", code="broken_body") from error


def open_listener(host: str, port: int, *, key: str) -> socket.socket:
    """Return a socket that listens at an address; port 0: any free port. `key` is the setting that errors name.

    Raises ConfigError for a host that does not resolve, and for an address that cannot be bound.
    """
    if not 0 <= port <= MAX_PORT:  # the resolver would take its last 16 bits
        raise ConfigError(key, f"{host}:{port}", f"{port} is no port; allowed: 0 to {MAX_PORT} (0: any free one)")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:  # UnicodeError: not a valid hostname
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
    """Serve connections to `listener`, and close those beyond `max_connections` at once, so that clients retry.

    Without the limit the process could run out of file descriptors anywhere. A connection whose headers do not arrive
    within `headers_timeout_s` is closed too.
    """
    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.BaseProtocol:
        if len(server.connections) >= max_connections:
            return _ConnectionRejector()
        settings = {"loop": loop, "access_log": None, "keepalive_timeout": IDLE_TIMEOUT_S}
        return Connection(server, headers_timeout_s=headers_timeout_s, **settings)

    return await loop.create_server(protocol, sock=listener, backlog=BACKLOG)


class Connection(web.RequestHandler):
    """A client's connection, closed if the headers of a request do not arrive in time."""

    __slots__ = ("_headers_timeout_s", "_is_refused", "_timer", "_waits")

    def __init__(self, manager: web.Server, *, headers_timeout_s: float, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._headers_timeout_s = headers_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._waits = True  # headers of a request are outstanding

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
        """Stop the timer; it starts again with the first byte after this request's response."""
        self._stop_timer()
        self._waits = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, or breaks off, with 400; anything else is a fault of ours."""
        if not isinstance(exc, MALFORMED):
            return super().handle_error(request, status, exc, message)
        self.log_exception("", exc_info=exc)
        response = web.Response(status=400, text=f"malformed request: {_reason(exc)}")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log one line for what is no HTTP, or breaks off, and a traceback for a fault of ours."""
        if not isinstance(error := kw.get("exc_info"), MALFORMED):
            super().log_exception(*args, **kw)
            return
        if self._is_refused:
            return
        self._is_refused = True  # the connection ends with this request, whose body may raise again
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        logger.warning("refused a malformed request from %s: %s", peer[0] if peer else "a client", _reason(error))

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
            logger.debug("closed connection from %s: headers are late", self.transport.get_extra_info("peername"))
            self.transport.abort()


def _reason(error: BaseException) -> str:
    return escape(" ".join(str(getattr(error, "message", error)).split()))


class _ConnectionRejector(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        logger.warning("closed connection from %s: too many connections", transport.get_extra_info("peername"))
        transport.close()


def _split_port(host: str) -> tuple[str, str]:
    """Split a Host header into its name, an IPv6 address with brackets, and its port, which may be empty."""
    if host.startswith("["):
        name, _, rest = host.partition("]")
        return f"{name}]", rest.removeprefix(":")
    name, _, port = host.rpartition(":") if ":" in host else (host, "", "")
    return name, port
