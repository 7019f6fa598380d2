"""The web application: aiohttp on a loopback address, read-only, guarded by a token.

One thread reads files and renders pages; the event loop only waits. Two loops run concurrently:
  requests   consume addresses, produce pages; wait for the thread
  follow     consumes what runs write, unblocks the streams of /events
"""

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from nemo_rl.errors import ConfigError, NemoRLError
from nemo_rl.viewer.page import Page
from nemo_rl.viewer.site import STATIC, Renderer, encode, find_page
from nemo_rl.viewer.viewer_sources import ViewerSources
from nemo_rl.web import Guard, Handler, Refused, accept, is_exposed, make_token, open_listener

POLL_S = 0.25  # period of reading the files
REFRESH_S = 2.0  # period of searching for new runs
HEARTBEAT_S = 15.0
MAX_STREAMS = 64
MAX_CONNECTIONS = 256  # open connections of browsers
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

ResultT = TypeVar("ResultT")


class Viewer:
    """The application over some sources."""

    def __init__(self, sources: ViewerSources, token: str | None = None) -> None:
        """`token` authenticates requests; None: a new one."""
        self.sources = sources
        self.token = token or make_token()
        self._guard = Guard("localhost", token=self.token, cookie="nemo-rl-view", loopback_only=True)
        self._renderer = Renderer()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="viewer")
        self._changed = asyncio.Condition()
        self._num_streams = 0
        self.app = web.Application(middlewares=[self._middleware])
        self.app.cleanup_ctx.append(self._follow_files)
        self.app.router.add_get("/events", self._events)
        self.app.router.add_static("/static", STATIC, follow_symlinks=False)
        self.app.router.add_get("/{path:.*}", self._page)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        def render() -> bytes:
            page = find_page(self.sources, request.raw_path)
            version = self.sources.get(page.live).version if page.live else 0  # files are read on this thread alone
            return encode(self._renderer.page(page, version=version))

        return web.Response(body=await self._run(render), content_type="text/html", charset="utf-8")

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await self._answer(request, handler)
        if not response.prepared:
            response.headers.update(SECURITY_HEADERS)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._guard.check(request)
        except Refused as error:
            if error.status == 401:
                return self._problem(
                    401, "Token needed", "Open the address that `nemo-rl view` printed, with its token."
                )
            return self._problem(error.status, "Forbidden", str(error))
        if request.method not in ("GET", "HEAD"):
            return self._problem(405, "Read-only", f"{request.method} is not allowed: the viewer only reads.")
        if request.path != "/events" and (redirect := self._guard.move_token_to_cookie(request)) is not None:
            return redirect
        try:
            return await handler(request)
        except web.HTTPException as error:
            return self._problem(error.status, error.reason, f"There is no page {request.path}.")
        except NemoRLError as error:
            return self._problem(404, "Not found", str(error))
        except OSError as error:
            return self._problem(404, "Not readable", f"{error.filename or 'a file'}: {error.strerror}")

    def _problem(self, status: int, heading: str, problem: str) -> web.Response:
        page = Page("problem.html", heading, {"heading": heading, "problem": problem})
        body = encode(self._renderer.page(page))
        return web.Response(status=status, body=body, content_type="text/html", charset="utf-8")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send a message whenever a source changes, until the client goes away."""
        source = self.sources.get(request.query.get("source", ""))
        if self._num_streams >= MAX_STREAMS:
            return self._problem(503, "Busy", f"{MAX_STREAMS} pages follow runs already; close some.")
        response = web.StreamResponse(headers={**SECURITY_HEADERS, "Content-Type": "text/event-stream"})
        self._num_streams += 1
        try:
            await response.prepare(request)
            seen = _seen_version(request, source.version)
            await response.write(b"retry: 1000\n: following\n\n")
            while True:
                try:
                    await asyncio.wait_for(self._wait_for_change(source.id, seen), HEARTBEAT_S)
                    seen = source.version
                    await response.write(f"id: {seen}\ndata: {seen}\n\n".encode())
                except TimeoutError:
                    await response.write(b": still here\n\n")
        except (ConnectionResetError, ConnectionError):
            return response
        finally:
            self._num_streams -= 1

    async def _wait_for_change(self, source_id: str, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.sources.get(source_id).version != seen)

    async def _follow_files(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._run(self._close_sources)
        self._thread.shutdown(wait=True)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        refreshed_at = loop.time()
        while True:
            versions = {source.id: source.version for source in self.sources.by_id.values()}
            has_more = False
            for source in list(self.sources.by_id.values()):
                has_more |= await self._run(lambda source=source: _advance(source.advance))
            if loop.time() - refreshed_at > REFRESH_S:
                await self._run(lambda: _advance(self.sources.refresh))
                refreshed_at = loop.time()
            if versions != {source.id: source.version for source in self.sources.by_id.values()}:
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(0.001 if has_more else POLL_S)

    def _close_sources(self) -> None:
        for source in self.sources.by_id.values():
            for rollouts in (*source.splits.values(), source.details):
                for index in rollouts.indexes:
                    index.close()


def _seen_version(request: web.Request, current: int) -> int:
    """Return the version that the client's page shows: of its last message, or of its rendering."""
    given = request.headers.get("Last-Event-ID") or request.query.get("seen", "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 12 else current


def _advance(work: Callable[[], bool | None]) -> bool:
    """Read on; a problem of one source must not end the others."""
    try:
        return bool(work())
    except (NemoRLError, OSError):
        return False
    except Exception:  # a bug: its traceback is printed  # noqa: BLE001
        traceback.print_exc()
        return False


async def serve(viewer: Viewer, *, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until cancelled. Raises ConfigError for an address that cannot be listened to."""
    if is_exposed(host):
        raise ConfigError("--host", host, "must be a loopback address: 127.0.0.1, ::1, localhost")
    runner = web.AppRunner(viewer.app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None  # setup made it
    try:
        listener = open_listener(host, port, key="--host, --port")
        accepting = await accept(runner.server, listener, max_connections=MAX_CONNECTIONS)
        name = f"[{host}]" if ":" in host else host
        announce(f"http://{name}:{listener.getsockname()[1]}/?token={viewer.token}")
        async with accepting:
            await asyncio.Event().wait()
    finally:
        await runner.cleanup()
