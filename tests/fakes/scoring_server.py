"""A scoring server on a free port of this machine, whose answers a test writes."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

Answer = Callable[[str, dict[str, Any]], Awaitable[web.Response]]  # (path, body)


@contextlib.asynccontextmanager
async def scoring_server(answer: Answer) -> AsyncIterator[str]:
    """Serve inside the block; yield the server's root."""

    async def handle(request: web.Request) -> web.Response:
        return await answer(request.path, await request.json())

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
