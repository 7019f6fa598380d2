"""The gateway as an HTTP server on aiohttp: routes, limits and errors; completions.py answers the calls.

    POST   /sessions                    run  {"seed"?} -> {"id", "base_url"}
    POST   /sessions/{id}/v1/...             a call in the session, by the paths of each API in dialects/
    POST   /sessions/{id}/reward        run  {"reward"} or {"rewards": {name: number}}, "completion_id"?
    POST   /sessions/{id}/reward_info   run  {"reward_info": {name: number}}, for clients of uni-agent's gateway
    GET    /sessions/{id}               run  its chains, token for token
    DELETE /sessions/{id}               run  the same, and the session is closed
    POST   /v1/...                           the same calls; a header, the API key or the body names the session
    POST   /v1/chat/completions         run  without a session: echoed token ids identify the chain
    ...    /captures/{rollout}/...      run  records of NeMo Gym's token capture: capture_api.py
    GET    /v1/models, /sessions/{id}/v1/models
    GET    /health

Endpoints marked "run" need the run's key as the API key, on every address: agents, and the processes that they start
for the policy, hold only a session's id, which opens calls in that session. Bound to more than localhost, or with a
configured key, the server requires one of both for every request but /health. A client that disconnects cancels its
generation.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web
from pydantic_core import to_json

from nemo_rl.config.images import GatewayImagesConfig
from nemo_rl.config.shared_sections import GatewayConfig
from nemo_rl.errors import ConfigError
from nemo_rl.gateway.calls import CallAnswer, CallRequest, Delta
from nemo_rl.gateway.capture_api import capture_routes
from nemo_rl.gateway.captures import CaptureStore
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionHandler, CompletionRules
from nemo_rl.gateway.dialects.dialect import Dialect, EventStream, find_none, load_dialects
from nemo_rl.gateway.echoes import EchoedCallStore
from nemo_rl.gateway.images import ImageStore, RequestImages
from nemo_rl.gateway.live_sessions import LiveSession, SessionRegistry
from nemo_rl.gateway.request_errors import RequestError
from nemo_rl.gateway.session_api import RewardRequest, SessionRequest, session_body
from nemo_rl.gateway.sessions import Session
from nemo_rl.gateway.side_calls import SideCallTest
from nemo_rl.interfaces import Generation
from nemo_rl.types import SamplingParams
from nemo_rl.web import Guard, Handler, Refused, accept, contains_key, is_exposed, make_token, open_listener, read_body

logger = logging.getLogger(__name__)

# Anthropic's clients add /v1 to a base URL themselves, Google's /v1beta or /v1.
PREFIXES = ("/sessions/{id}/v1", "/v1", "/v1beta", "/sessions/{id}/v1beta", "/sessions/{id}/v1/v1")
PREFIXES += ("/sessions/{id}/v1/v1beta",)
SESSION_HEADER = "X-NeMo-RL-Session"
NO_SESSION = f"this API needs a session: in the base URL, in the header {SESSION_HEADER}, or its id as the API key"
NO_RUN_KEY = "this needs the run's key, gateway.token_env, as the API key; a session's opens only calls in that session"
Complete: TypeAlias = Callable[..., Coroutine[Any, Any, CallAnswer]]
INTERNAL_ERROR = RequestError(500, "internal gateway error; see the gateway log", code="internal")
SHUTDOWN_S = 1.0  # grace period for running calls without a session when the server closes


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address and limits of a server."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    advertised_host: str | None = None  # hostname advertised to agents; None: `host`
    token: str | None = None  # the run's key; None: a random one
    max_sessions: int = 4096  # opened by this program
    max_client_sessions: int = 1024  # opened over HTTP
    max_connections: int = 4096
    max_echoed_calls: int = 65_536  # stored for clients without a session
    max_captured_bytes: int = 512 * 2**20  # limit for captured records
    ttl_s: float = 3600.0  # time to live of unused sessions, stored calls and captures
    max_body_bytes: int = 32 * 2**20
    headers_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    allowed_hosts: tuple[str, ...] = ()  # accepted in Host headers, besides this machine's names
    images: GatewayImagesConfig = field(default_factory=GatewayImagesConfig)  # of requests, if the policy sees


def read_token(section: GatewayConfig) -> str | None:
    """Return the API key of `gateway.token_env`; raises ConfigError if that variable is not set."""
    if section.token_env is None:
        return None
    if not (token := os.environ.get(section.token_env, "").strip()):
        raise ConfigError("gateway.token_env", section.token_env, "this environment variable is not set, or empty")
    return token


def check_gateway(section: GatewayConfig) -> None:
    """Raise ConfigError, before an engine loads, for an address or a token that no server could start with."""
    read_token(section)
    open_listener(section.host, section.port, key="gateway.host, gateway.port").close()


class GatewayServer:
    """Serves one engine to agents; created by `start` and ended by `close` in the engine's event loop."""

    def __init__(
        self, generation: Generation, codec: Codec, rules: CompletionRules, settings: ServerSettings | None = None
    ) -> None:
        """Use `start`."""
        self._settings = settings = settings or ServerSettings()
        self._codec = codec
        self._rules = rules
        self._completions = CompletionHandler(generation, codec, rules)
        self._dialects = load_dialects()
        encoder = codec.encoder.images
        self._images = None if encoder is None else ImageStore(settings.images, encoder)
        clock = time.monotonic
        self._sessions = SessionRegistry(
            codec,
            max_sessions=settings.max_sessions,
            max_client_sessions=settings.max_client_sessions,
            ttl_s=settings.ttl_s,
            clock=clock,
        )
        self.echoed = EchoedCallStore(codec, max_calls=settings.max_echoed_calls, ttl_s=settings.ttl_s, clock=clock)
        self.captures = CaptureStore(max_bytes=settings.max_captured_bytes, ttl_s=settings.ttl_s, clock=clock)
        self.token = settings.token or make_token()
        requires_key = settings.token is not None or is_exposed(settings.host)
        hosts = (*settings.allowed_hosts, *([settings.advertised_host] if settings.advertised_host else []))
        self._guard = Guard(
            settings.host,
            token=self.token if requires_key else None,
            allowed_hosts=hosts,
            public_paths=("/health",),
            knows_key=self._sessions.is_known,
            key_headers=[header for dialect in self._dialects for header in dialect.key_headers],
            key_parameters=[parameter for dialect in self._dialects for parameter in dialect.key_parameters],
        )
        self.port = settings.port
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, generation: Generation, codec: Codec, rules: CompletionRules, settings: ServerSettings | None = None
    ) -> "GatewayServer":
        """Start a server that listens on return; raises ConfigError for an address that cannot be bound."""
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
        self,
        *,
        seed: int | None = None,
        sampling: SamplingParams | None = None,
        trains: bool = True,
        by_client: bool = False,
        is_side_call: SideCallTest | None = None,
    ) -> str:
        """Open a session and return its id; raises RequestError 429 when too many are open.

        `sampling` replaces the run's for this session, as for a greedy validation beside sampled training. Calls that
        `is_side_call` is true of are answered, and are in none of its chains.
        """
        seed = self._completions.next_session_seed() if seed is None else seed
        live = self._sessions.open(
            seed=seed, sampling=sampling, trains=trains, by_client=by_client, is_side_call=is_side_call
        )
        return live.session_id

    def reward_calls(self, session_id: str, rewards: Mapping[str, Mapping[str, float]]) -> None:
        """Store rewards by name for the chains through each completion id; raises RequestError 404 or 409."""
        session = self._sessions.get(session_id).session
        for completion_id, by_name in rewards.items():
            _reward(session, by_name, completion_id)

    def session_url(self, session_id: str) -> str:
        """Return the OPENAI_BASE_URL of a session's agent."""
        return f"{self.base_url}/sessions/{session_id}/v1"

    def close_session(self, session_id: str) -> Session:
        """Close a session, cancel its running calls and return it; raises RequestError 404 or 409."""
        return self._sessions.close(session_id)

    async def close(self) -> None:
        """Cancel running calls and stop listening. May be called twice."""
        self._sessions.close_all()
        if self._images is not None:
            self._images.close()
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
                web.post("/sessions", self._with_run_key(self._open)),
                web.get("/sessions/{id}", self._with_run_key(self._read)),
                web.delete("/sessions/{id}", self._with_run_key(self._close)),
                web.post("/sessions/{id}/reward", self._with_run_key(self._reward)),
                web.post("/sessions/{id}/reward_info", self._with_run_key(self._reward)),
                web.get("/sessions/{id}/v1/models", self._models),
                *capture_routes(self.captures, self._body, self._with_run_key),
            ]
        )
        for prefix in PREFIXES:
            call = self._call if "{id}" in prefix else self._call_on_plain_path
            for dialect in self._dialects:
                for path in dialect.paths:
                    app.router.add_post(f"{prefix}{path}", partial(call, dialect=dialect))
                for path in dialect.count_paths:
                    app.router.add_post(f"{prefix}{path}", partial(self._count_tokens, dialect=dialect))
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
        logger.info("gateway: listening on %s", self.base_url)

    async def _sweep(self) -> None:
        """Close sessions that are past their time to live, until cancelled."""
        while True:
            await asyncio.sleep(max(self._settings.ttl_s / 10, 0.05))
            self.echoed.expire()
            self.captures.expire()
            if expired := self._sessions.expire():
                logger.warning("gateway: closed %d sessions after %g s without use", len(expired), self._settings.ttl_s)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authenticate the request; render errors in the caller's API format."""
        try:
            self._guard.check(request)
            return await handler(request)
        except RequestError as error:
            request_error = error
        except Refused as error:
            request_error = RequestError(error.status, str(error), code=error.code)
        except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, too large a body
            request_error = RequestError(error.status, error.reason)
        except ConnectionError:
            raise
        except Exception:
            logger.exception("gateway: request failed")
            request_error = INTERNAL_ERROR
        headers = {"Retry-After": "1"} if request_error.status == 429 else None
        dialect = self._find_dialect(request.path)
        body = request_error.body() if dialect is None else dialect.render_error(request_error)
        return web.json_response(body, status=request_error.status, headers=headers)

    def _find_dialect(self, path: str) -> Dialect | None:
        """Return the API of a path, even if no route matches the whole path; None for the gateway's own endpoints."""
        for dialect in self._dialects:
            suffixes = (each.rpartition("}")[2] for each in (*dialect.paths, *dialect.count_paths))
            if path.endswith(tuple(suffixes)):
                return dialect
        return None

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self._settings.body_timeout_s)

    def _session(self, request: web.Request) -> LiveSession:
        return self._sessions.get(request.match_info["id"])

    def _with_run_key(self, handler: Handler) -> Handler:
        """Return the handler for holders of the run's key; others are refused before their body is read."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            self._require_run_key(request)
            return await handler(request)

        return guarded

    def _require_run_key(self, request: web.Request) -> None:
        if not contains_key(self._guard.api_keys(request), self.token):
            raise RequestError(401, NO_RUN_KEY, code="invalid_api_key")

    async def _health(self, request: web.Request) -> web.Response:
        queue = self._completions.queue
        counts = {"sessions": self.num_sessions, "calls": queue.num_running, "waiting": queue.num_waiting}
        return web.json_response({"status": "ok", **counts})

    async def _models(self, request: web.Request) -> web.Response:
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "nemo-rl"} for name in self._rules.names]
        return web.json_response({"object": "list", "data": models})

    async def _open(self, request: web.Request) -> web.Response:
        parsed = SessionRequest.from_json(await self._body(request) or b"{}")
        session_id = self.open_session(seed=parsed.seed, by_client=True)
        return web.json_response({"id": session_id, "object": "session", "base_url": self.session_url(session_id)})

    async def _read(self, request: web.Request) -> web.Response:
        live = self._session(request)
        return web.json_response(session_body(live.session_id, live.session))

    async def _close(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        return web.json_response(session_body(session_id, self.close_session(session_id)))

    async def _reward(self, request: web.Request) -> web.Response:
        self._session(request)
        parsed = RewardRequest.from_json(await self._body(request))
        session = self._session(request).session  # again: it may have ended while the body arrived
        _reward(session, parsed.named(), parsed.completion_id)
        return web.json_response({"rewards": session.rewards})

    async def _call(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        self._session(request)
        body = await self._body(request)
        images = RequestImages(self._images)
        call = dialect.parse(body, request.rel_url, self._session(request).session.response, images)
        call = await self._read_images(call, images)
        live = self._session(request)  # again: the session may have ended while body and images were read
        complete = partial(self._completions.complete_in_session, call, live)
        return await self._respond(request, dialect, call, complete, live)

    async def _call_on_plain_path(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        """Answer a call outside of a session's path: a header, the API key or the body may name a session.

        A call without a session needs the run's key.
        """
        live = self._keyed_session(request)
        body = await self._body(request)
        find_response = find_none if live is None else live.session.response
        images = RequestImages(self._images)
        call = dialect.parse(body, request.rel_url, find_response, images)
        call = await self._read_images(call, images)
        is_named = live is None and call.session_id is not None
        session_id = call.session_id if live is None else live.session_id
        if session_id is not None:  # again: the session may have ended while body and images were read
            live = self._sessions.get(session_id)
        if live is not None:
            complete = partial(self._completions.complete_in_session, call, live, is_named=is_named)
        elif dialect.needs_session:
            raise RequestError(400, NO_SESSION, code="no_session")
        else:
            self._require_run_key(request)
            complete = partial(self._completions.complete_without_session, call, self.echoed)
        return await self._respond(request, dialect, call, complete, live)

    async def _count_tokens(self, request: web.Request, dialect: Dialect) -> web.Response:
        live = self._session(request) if "id" in request.match_info else self._keyed_session(request)
        if live is None:
            self._require_run_key(request)
        images = RequestImages(self._images)
        call = await self._read_images(dialect.parse_count(await self._body(request), images), images)
        return web.json_response(dialect.render_count(self._completions.count_tokens(call, live)))

    async def _read_images(self, call: CallRequest, images: RequestImages) -> CallRequest:
        """Decode and encode a call's images while others continue; raises RequestError as `RequestImages.check`."""
        return replace(call, num_image_tokens=await images.check(self._rules.max_model_len))

    def _keyed_session(self, request: web.Request) -> LiveSession | None:
        """Return the session that the header or the API key names; raises RequestError for an unknown one."""
        if (named := request.headers.get(SESSION_HEADER)) is not None:
            return self._sessions.get(named)
        key = next((key for key in self._guard.api_keys(request) if self._sessions.is_known(key)), None)
        return None if key is None else self._sessions.get(key)

    async def _respond(
        self, request: web.Request, dialect: Dialect, call: CallRequest, complete: Complete, live: LiveSession | None
    ) -> web.StreamResponse:
        """Answer a call; an answer that cannot be sent counts as undelivered in its session."""
        answers: list[CallAnswer] = []

        async def noting(**how: Any) -> CallAnswer:
            answers.append(await complete(**how))
            return answers[-1]

        try:
            if call.stream:
                return await self._stream(request, dialect.open_stream(call), noting)
            body = to_json(dialect.render(call, await noting(), self._codec.encoder))
            response = web.Response(body=body, content_type="application/json")
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            for answer in answers:
                if live is not None:
                    live.session.mark_undelivered(answer.completion_id)
            raise
        return response

    async def _stream(self, request: web.Request, events: EventStream, complete: Complete) -> web.StreamResponse:
        """Send events while tokens are sampled; an error before the first event is answered as without streaming."""
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
            except RequestError as error:
                if not response.prepared:
                    raise
                end = events.render_failure(error)
            except Exception:
                if not response.prepared:
                    raise
                logger.exception("gateway: streamed call failed")
                end = events.render_failure(INTERNAL_ERROR)
            if not response.prepared:
                await response.prepare(request)
            await response.write_eof(unsent + end)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return response


def _reward(session: Session, rewards: Mapping[str, float], completion_id: str | None) -> None:
    """Store rewards; raises RequestError 404 for an unknown completion."""
    try:
        session.reward(rewards, completion_id=completion_id)
    except KeyError as error:
        raise RequestError(404, f"no completion {completion_id!r} in this session", param="completion_id") from error


async def _waiting(deltas: asyncio.Queue[Delta | None]) -> list[Delta | None]:
    """Wait for a delta and return it with those queued after it, to share a write: writes dominate the cost."""
    waiting = [await deltas.get()]
    while not deltas.empty():
        waiting.append(deltas.get_nowait())
    return waiting
