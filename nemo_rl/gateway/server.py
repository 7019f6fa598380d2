"""The gateway as an HTTP server on aiohttp: routes, limits and errors; completions.py answers a call.

    POST   /sessions                            {"seed"?} -> {"id", "base_url"}
    POST   /sessions/{id}/v1/chat/completions   OpenAI's chat completions, as part of the session
    POST   /sessions/{id}/reward                {"reward"} or {"rewards": {name: number}}, "completion_id"?
    GET    /sessions/{id}                       its chains, token for token
    DELETE /sessions/{id}                       the same, and the session is closed
    POST   /v1/chat/completions                 echoed token ids identify the chain, `metadata` the session
    GET    /v1/models, /sessions/{id}/v1/models
    GET    /health

A client that disconnects cancels its generation. The server binds to localhost by default, where a session's id is its
secret. Bound elsewhere, every request but /health needs the server's token as its API key.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from pydantic_core import to_json

from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionHandler, CompletionRules
from nemo_rl.gateway.echoes import EchoedCallStore
from nemo_rl.gateway.registry import LiveSession, SessionRegistry
from nemo_rl.gateway.responses import Answer, completion_body, event_stream, session_body
from nemo_rl.gateway.schema import ChatRequest, RequestError, RewardRequest, SessionRequest, parse_body
from nemo_rl.gateway.sessions import Session
from nemo_rl.interfaces import Generation
from nemo_rl.types import SamplingParams

logger = logging.getLogger(__name__)

BACKLOG = 1024  # connections that wait to be accepted


async def accept(server: web.Server, listener: socket.socket, *, max_connections: int) -> asyncio.Server:
    """Serve connections to `listener`, and close those beyond `max_connections` at once, for clients to retry.

    Without the limit the process would run out of file descriptors, wherever it opens the next file.
    """

    def protocol() -> asyncio.BaseProtocol:
        return _ConnectionRejector() if len(server.connections) >= max_connections else server()

    return await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=BACKLOG)


class _ConnectionRejector(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        logger.warning("closed connection from %s: too many connections", transport.get_extra_info("peername"))
        transport.close()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SHUTDOWN_S = 1.0  # for calls without a session that still run when the server is closed; then they are cancelled


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address and limits of a server."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    advertised_host: str | None = None  # under which agents reach it; None: `host`
    token: str | None = None  # None: none on a loopback address, else a random one
    max_sessions: int = 4096
    max_connections: int = 4096
    max_echoed_calls: int = 65_536  # kept for clients without a session
    ttl_s: float = 3600.0  # of unused sessions and calls
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0  # for a request's body to arrive


class GatewayServer:
    """Serves one engine to agents. Created by `start`, ended by `close`, both in the event loop of the engine."""

    def __init__(
        self, generation: Generation, codec: Codec, rules: CompletionRules, settings: ServerSettings | None = None
    ) -> None:
        """Use `start`."""
        self._settings = settings = settings or ServerSettings()
        self._codec = codec
        self._rules = rules
        self._completions = CompletionHandler(generation, codec, rules)
        clock = time.monotonic
        self._sessions = SessionRegistry(codec, max_sessions=settings.max_sessions, ttl_s=settings.ttl_s, clock=clock)
        self.echoed = EchoedCallStore(codec, max_calls=settings.max_echoed_calls, ttl_s=settings.ttl_s, clock=clock)
        self.token = settings.token
        if self.token is None and not _is_loopback(settings.host):
            self.token = secrets.token_urlsafe(32)
        self.port = settings.port
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, generation: Generation, codec: Codec, rules: CompletionRules, settings: ServerSettings | None = None
    ) -> "GatewayServer":
        """Start a server, which listens on return; raises OSError for an address that cannot be bound."""
        server = cls(generation, codec, rules, settings)
        await server._listen()
        return server

    @property
    def base_url(self) -> str:
        """Return the server's root; an OpenAI client's base URL is this followed by /v1."""
        host = self._settings.advertised_host or self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open_session(self, *, seed: int | None = None, sampling: SamplingParams | None = None) -> str:
        """Open a session and return its id; raises RequestError 429 when too many are open.

        `sampling` replaces that of the rules for this session: a greedy validation beside sampled training.
        """
        seed = self._completions.next_session_seed() if seed is None else seed
        return self._sessions.open(seed=seed, sampling=sampling).session_id

    def session_url(self, session_id: str) -> str:
        """Return the OPENAI_BASE_URL of a session's agent."""
        return f"{self.base_url}/sessions/{session_id}/v1"

    def close_session(self, session_id: str) -> Session:
        """Close a session, cancel its running calls and return it; raises RequestError 404 or 409."""
        return self._sessions.close(session_id)

    async def close(self) -> None:
        """Cancel running calls and stop listening. May be called twice."""
        self._sessions.close_all()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
            self._sweeper = None
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _listen(self) -> None:
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[self._middleware])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat_without_session),
                web.post("/sessions", self._open),
                web.get("/sessions/{id}", self._read),
                web.delete("/sessions/{id}", self._close),
                web.post("/sessions/{id}/reward", self._reward),
                web.get("/sessions/{id}/v1/models", self._models),
                web.post("/sessions/{id}/v1/chat/completions", self._chat),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None  # setup made it
        family = socket.AF_INET6 if ":" in self._settings.host else socket.AF_INET
        try:
            listener = socket.create_server((self._settings.host, self._settings.port), family=family, backlog=BACKLOG)
            self.port = listener.getsockname()[1]
            limit = self._settings.max_connections
            self._accepting = await accept(server, listener, max_connections=limit)
        except OSError:
            await self._runner.cleanup()
            raise
        self._sweeper = asyncio.create_task(self._sweep())
        logger.info("the gateway listens on %s", self.base_url)

    async def _sweep(self) -> None:
        """Close sessions that were unused for long, until cancelled."""
        while True:
            await asyncio.sleep(max(self._settings.ttl_s / 10, 0.05))
            self.echoed.expire()
            if expired := self._sessions.expire():
                logger.warning("%d sessions were closed after %g s without use", len(expired), self._settings.ttl_s)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who may come in, and give every error its envelope."""
        try:
            self._check_token(request)
            return await handler(request)
        except RequestError as error:
            request_error = error
        except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, too large a body
            request_error = RequestError(error.status, error.reason)
        except ConnectionError:
            raise
        except Exception:
            logger.exception("a request to the gateway failed")
            request_error = RequestError(500, "the gateway failed at this request; its log tells why", code="internal")
        headers = {"Retry-After": "1"} if request_error.status == 429 else None
        return web.json_response(request_error.body(), status=request_error.status, headers=headers)

    def _check_token(self, request: web.Request) -> None:
        if self.token is None or request.path == "/health":
            return
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.token.encode()):
            raise RequestError(401, "this gateway needs its token as the API key", code="invalid_api_key")

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except TimeoutError as error:
            raise RequestError(408, "the body of the request did not arrive in time", code="slow_body") from error
        except web.RequestPayloadError as error:
            raise RequestError(400, "the body of the request is not what its headers say") from error

    def _session(self, request: web.Request) -> LiveSession:
        return self._sessions.get(request.match_info["id"])

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"status": "ok", "sessions": self.num_sessions, "calls": self._completions.num_running}
        )

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._rules.model_name, "object": "model", "created": 0, "owned_by": "nemo-rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _open(self, request: web.Request) -> web.Response:
        parsed = parse_body(SessionRequest, await self._body(request) or b"{}")
        session_id = self.open_session(seed=parsed.seed)
        return web.json_response({"id": session_id, "object": "session", "base_url": self.session_url(session_id)})

    async def _read(self, request: web.Request) -> web.Response:
        live = self._session(request)
        return web.json_response(session_body(live.session_id, live.session))

    async def _close(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        return web.json_response(session_body(session_id, self.close_session(session_id)))

    async def _reward(self, request: web.Request) -> web.Response:
        self._session(request)
        parsed = parse_body(RewardRequest, await self._body(request))
        session = self._session(request).session  # again: the body may have taken its time
        try:
            session.reward(parsed.named(), completion_id=parsed.completion_id)
        except KeyError as error:
            raise RequestError(404, "no such completion in this session", param="completion_id") from error
        return web.json_response({"rewards": session.rewards})

    async def _chat(self, request: web.Request) -> web.Response:
        self._session(request)
        parsed = parse_body(ChatRequest, await self._body(request))
        answer = await self._completions.complete_in_session(parsed, self._session(request))
        return self._make_response(parsed, answer)

    async def _chat_without_session(self, request: web.Request) -> web.Response:
        parsed = parse_body(ChatRequest, await self._body(request))
        if (session_id := parsed.session_id) is None:
            return self._make_response(parsed, await self._completions.complete_without_session(parsed, self.echoed))
        live = self._sessions.get(session_id)
        return self._make_response(parsed, await self._completions.complete_in_session(parsed, live, is_named=True))

    def _make_response(self, parsed: ChatRequest, answer: Answer) -> web.Response:
        if not parsed.stream:
            body = to_json(completion_body(answer, self._codec.encoder))
            return web.Response(body=body, content_type="application/json")
        include_usage = parsed.stream_options is not None and bool(parsed.stream_options.include_usage)
        events = event_stream(answer, self._codec.encoder, include_usage=include_usage)
        return web.Response(body=events, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
