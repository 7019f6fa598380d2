"""The gateway as an HTTP server on aiohttp: routes, limits and errors; completions.py answers a call.

    POST   /sessions                            {"seed"?} -> {"id", "base_url"}
    POST   /sessions/{id}/v1/chat/completions   OpenAI's chat completions, as part of the session
    POST   /sessions/{id}/v1/messages           Anthropic's Messages, and /v1/messages/count_tokens
    POST   /sessions/{id}/v1/responses          OpenAI's Responses
    POST   /sessions/{id}/v1beta/models/...     Google's Gemini: {model}:generateContent, :streamGenerateContent,
                                                :countTokens
    POST   /sessions/{id}/reward                {"reward"} or {"rewards": {name: number}}, "completion_id"?
    GET    /sessions/{id}                       its chains, token for token
    DELETE /sessions/{id}                       the same, and the session is closed
    POST   /v1/...                              the same: a header or the API key names the session;
                                                chat completions need none: echoed token ids identify the chain
    GET    /v1/models, /sessions/{id}/v1/models
    GET    /health

A client that disconnects cancels its generation. The server binds to localhost by default, where a session's id is its
secret. Bound elsewhere, every request but /health needs the server's token as its API key; `web.Guard` decides.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web
from pydantic_core import to_json

from nemo_rl.config.run import GatewayConfig
from nemo_rl.errors import ConfigError
from nemo_rl.gateway import schema
from nemo_rl.gateway.calls import Answer, CallRequest, CountingDialect, Dialect, EventStream
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionHandler, CompletionRules
from nemo_rl.gateway.dialects.chat_completions import ChatCompletions
from nemo_rl.gateway.dialects.gemini import Gemini
from nemo_rl.gateway.dialects.messages import Messages
from nemo_rl.gateway.dialects.responses import Responses
from nemo_rl.gateway.echoes import EchoedCallStore
from nemo_rl.gateway.registry import LiveSession, SessionRegistry
from nemo_rl.gateway.sessions import Session
from nemo_rl.gateway.streaming import Delta
from nemo_rl.interfaces import Generation
from nemo_rl.types import SamplingParams
from nemo_rl.web import Guard, Handler, Refused, accept, api_keys, is_exposed, make_token, open_listener, read_body

logger = logging.getLogger(__name__)

CHAT = ChatCompletions()
DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": CHAT,
    "/messages": (MESSAGES := Messages()),
    "/responses": Responses(),
    "/models/{model:.+}:generateContent": (GEMINI := Gemini()),
    "/models/{model:.+}:streamGenerateContent": Gemini(streams=True),
}
COUNTERS: Mapping[str, CountingDialect] = {"/messages/count_tokens": MESSAGES, "/models/{model:.+}:countTokens": GEMINI}
# Anthropic's clients add /v1 to a base URL themselves, Google's /v1beta or /v1.
PREFIXES = ("/sessions/{id}/v1", "/v1", "/v1beta", "/sessions/{id}/v1beta", "/sessions/{id}/v1/v1")
PREFIXES += ("/sessions/{id}/v1/v1beta",)
SESSION_HEADER = "X-NeMo-RL-Session"
NO_SESSION = f"this API needs a session: in the base URL, in the header {SESSION_HEADER}, or its id as the API key"
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
    headers_timeout_s: float = 30.0  # for a request's headers to arrive
    body_timeout_s: float = 60.0  # for its body
    allowed_hosts: tuple[str, ...] = ()  # names in a Host header besides this machine's


def read_token(section: GatewayConfig) -> str | None:
    """Return the API key of `gateway.token_env`; raises ConfigError where that variable is not set."""
    if section.token_env is None:
        return None
    if not (token := os.environ.get(section.token_env, "").strip()):
        raise ConfigError("gateway.token_env", section.token_env, "this environment variable is not set, or empty")
    return token


def check_gateway(section: GatewayConfig) -> None:
    """Raise ConfigError, before an engine loads, for an address or a token with which no server could start."""
    read_token(section)
    open_listener(section.host, section.port, key="gateway.host, gateway.port").close()


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
        self.token = settings.token or (make_token() if is_exposed(settings.host) else None)
        hosts = (*settings.allowed_hosts, *([settings.advertised_host] if settings.advertised_host else []))
        self._guard = Guard(
            settings.host,
            token=self.token,
            allowed_hosts=hosts,
            public_paths=("/health",),
            knows_key=self._sessions.is_known,  # a session's id is a secret of its own
        )
        self.port = settings.port
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, generation: Generation, codec: Codec, rules: CompletionRules, settings: ServerSettings | None = None
    ) -> "GatewayServer":
        """Start a server, which listens on return; raises ConfigError for an address that cannot be bound."""
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

    def open_session(
        self, *, seed: int | None = None, sampling: SamplingParams | None = None, trains: bool = True
    ) -> str:
        """Open a session and return its id; raises RequestError 429 when too many are open.

        `sampling` replaces that of the rules for this session: a greedy validation beside sampled training.
        """
        seed = self._completions.next_session_seed() if seed is None else seed
        return self._sessions.open(seed=seed, sampling=sampling, trains=trains).session_id

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
                web.post("/sessions", self._open),
                web.get("/sessions/{id}", self._read),
                web.delete("/sessions/{id}", self._close),
                web.post("/sessions/{id}/reward", self._reward),
                web.get("/sessions/{id}/v1/models", self._models),
            ]
        )
        for prefix in PREFIXES:
            call = self._call if "{id}" in prefix else self._call_on_plain_path
            for path, dialect in DIALECTS.items():
                app.router.add_post(f"{prefix}{path}", partial(call, dialect=dialect))
            for path, counter in COUNTERS.items():
                app.router.add_post(f"{prefix}{path}", partial(self._count_tokens, dialect=counter))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None  # setup made it
        settings = self._settings
        try:
            listener = open_listener(settings.host, settings.port, key="gateway.host, gateway.port")
            self.port = listener.getsockname()[1]
            self._accepting = await accept(
                server,
                listener,
                max_connections=settings.max_connections,
                headers_timeout_s=settings.headers_timeout_s,
            )
        except BaseException:
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
            self._guard.check(request)
            return await handler(request)
        except schema.RequestError as error:
            request_error = error
        except Refused as error:
            request_error = schema.RequestError(error.status, str(error), code=error.code)
        except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, too large a body
            request_error = schema.RequestError(error.status, error.reason)
        except ConnectionError:
            raise
        except Exception:
            logger.exception("a request to the gateway failed")
            request_error = schema.RequestError(
                500, "the gateway failed at this request; its log tells why", code="internal"
            )
        headers = {"Retry-After": "1"} if request_error.status == 429 else None
        body = _dialect_of(request.path).render_error(request_error)
        return web.json_response(body, status=request_error.status, headers=headers)

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self._settings.body_timeout_s)

    def _session(self, request: web.Request) -> LiveSession:
        return self._sessions.get(request.match_info["id"])

    async def _health(self, request: web.Request) -> web.Response:
        queue = self._completions.queue
        counts = {"sessions": self.num_sessions, "calls": queue.num_running, "waiting": queue.num_waiting}
        return web.json_response({"status": "ok", **counts})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._rules.model_name, "object": "model", "created": 0, "owned_by": "nemo-rl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _open(self, request: web.Request) -> web.Response:
        parsed = schema.parse_body(schema.SessionRequest, await self._body(request) or b"{}")
        session_id = self.open_session(seed=parsed.seed)
        return web.json_response({"id": session_id, "object": "session", "base_url": self.session_url(session_id)})

    async def _read(self, request: web.Request) -> web.Response:
        live = self._session(request)
        return web.json_response(schema.session_body(live.session_id, live.session))

    async def _close(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        return web.json_response(schema.session_body(session_id, self.close_session(session_id)))

    async def _reward(self, request: web.Request) -> web.Response:
        self._session(request)
        parsed = schema.parse_body(schema.RewardRequest, await self._body(request))
        session = self._session(request).session  # again: the body may have taken its time
        try:
            session.reward(parsed.named(), completion_id=parsed.completion_id)
        except KeyError as error:
            raise schema.RequestError(404, "no such completion in this session", param="completion_id") from error
        return web.json_response({"rewards": session.rewards})

    async def _read_call(self, request: web.Request, dialect: Dialect) -> CallRequest:
        """Return the neutral call of a request's body and address; raises RequestError."""
        call = dialect.parse(await self._body(request))
        if (model := request.match_info.get("model")) is None:
            return call
        if call.stream and request.query.get("alt") != "sse":
            raise schema.make_unsupported_error("alt", "alt: a stream is of events; add ?alt=sse")
        return replace(call, model=model)  # Gemini's addresses name it

    async def _call(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        self._session(request)
        call = await self._read_call(request, dialect)
        live = self._session(request)  # again: the body may have taken its time
        return await self._respond(request, dialect, call, partial(self._completions.complete_in_session, call, live))

    async def _call_on_plain_path(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        """Answer a call whose session is named by a header, the API key or the body, or which has none."""
        live = self._keyed_session(request)
        call = await self._read_call(request, dialect)
        if live is not None:
            live = self._sessions.get(live.session_id)  # again: the body may have taken its time
        is_named = live is None and call.session_id is not None
        if call.session_id is not None and live is None:
            live = self._sessions.get(call.session_id)
        if live is not None:
            complete = partial(self._completions.complete_in_session, call, live, is_named=is_named)
        elif isinstance(dialect, ChatCompletions):
            complete = partial(self._completions.complete_without_session, call, self.echoed)
        else:
            raise schema.RequestError(400, NO_SESSION, code="no_session")
        return await self._respond(request, dialect, call, complete)

    async def _count_tokens(self, request: web.Request, dialect: CountingDialect) -> web.Response:
        live = self._session(request) if "id" in request.match_info else self._keyed_session(request)
        call = dialect.parse_count(await self._body(request))
        return web.json_response(dialect.render_count(self._completions.count_tokens(call, live)))

    def _keyed_session(self, request: web.Request) -> LiveSession | None:
        """Return the session that the header or the API key names; raises RequestError for an unknown one."""
        if (named := request.headers.get(SESSION_HEADER)) is not None:
            return self._sessions.get(named)
        key = next((key for key in api_keys(request) if self._sessions.is_known(key)), None)
        return None if key is None else self._sessions.get(key)

    async def _respond(
        self, request: web.Request, dialect: Dialect, call: CallRequest, complete: Callable[..., Awaitable[Answer]]
    ) -> web.StreamResponse:
        if call.stream:
            return await self._stream(request, dialect.open_stream(call), complete)
        answer = await complete()
        body = to_json(dialect.render(call, answer, self._codec.encoder))
        return web.Response(body=body, content_type="application/json")

    async def _stream(
        self, request: web.Request, events: EventStream, complete: Callable[..., Awaitable[Answer]]
    ) -> web.StreamResponse:
        """Send events while tokens are sampled. An error before the first one is answered as without streaming."""
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        task = asyncio.ensure_future(complete(sink=deltas.put_nowait))
        task.add_done_callback(lambda _: deltas.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            while True:
                waiting = await _waiting(deltas)
                unsent = b"".join([events.render_delta(delta) for delta in waiting if delta is not None])
                if waiting[-1] is None:
                    break
                if not response.prepared:
                    await response.prepare(request)
                if unsent:
                    await response.write(unsent)
            try:
                end = events.render_end(await task, self._codec.encoder)
            except schema.RequestError as error:
                if not response.prepared:
                    raise
                end = events.render_failure(error)
            except Exception:
                if not response.prepared:
                    raise
                logger.exception("a streamed call failed")
                text = "the gateway failed at this request; its log tells why"
                end = events.render_failure(schema.RequestError(500, text, code="internal"))
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof(unsent + end)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return response


def _dialect_of(path: str) -> Dialect:
    """Return the API that a path is of, for the envelope of an error."""
    if path.endswith(("/messages", "/messages/count_tokens")):
        return MESSAGES
    return GEMINI if path.endswith((":generateContent", ":streamGenerateContent", ":countTokens")) else CHAT


async def _waiting(deltas: asyncio.Queue[Delta | None]) -> list[Delta | None]:
    """Wait for a delta and return it with those after it: they share a write, which costs more than all else."""
    waiting = [await deltas.get()]
    while not deltas.empty():
        waiting.append(deltas.get_nowait())
    return waiting
