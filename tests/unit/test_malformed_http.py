"""Malformed HTTP to every server: an answer or a closed connection, one line in the log at most, and no traceback."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from nemo_rl.jobs.server_router import Router
from nemo_rl.viewer.viewer_sources import ViewerSources
from nemo_rl.viewer.web_app import Viewer
from nemo_rl.web import Guard, accept, open_listener
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.engines import started
from tests.unit.viewer.rundirs import rollout, write_run

ANSWER_S = 10.0  # longest wait for an answer
UNFINISHED_S = 0.3  # after it the client ends a request that the server waits to be completed
TOKEN = b"Authorization: Bearer t\r\n"


def get(
    target: bytes, headers: bytes = b"", method: bytes = b"GET", version: bytes = b"HTTP/1.1", body: bytes = b""
) -> bytes:
    """Return the bytes of a request that is right but for its arguments."""
    head = method + b" " + target + b" " + version + b"\r\nHost: 127.0.0.1\r\n"
    return head + TOKEN + b"Connection: close\r\n" + headers + b"\r\n" + body


def post(headers: bytes, body: bytes = b"") -> bytes:
    return get(b"/sessions", headers, b"POST", body=body)


TARGETS = [
    b"/%ff",
    b"/%",
    b"/%zz",
    b"/%00",
    b"/\x00",
    b"/\xff",
    b"//",
    b"//[",
    b"///evil",
    b"http://[",
    b"http://evil/x",
    b"http://127.0.0.1:99999/",
    b"https://127.0.0.1/",
    b"*",
    b"evil:80",
    b"/..",
    b"/../../etc/passwd",
    b"/%2e%2e/%2e%2e/etc/passwd",
    b"/static/../../page.py",
    b"/static/%2e%2e/page.py",
    b"/static/",
    b"/static/%00",
    b"/?" + b"a&" * 3000,
    b"/?a=%ff",
    b"/?=%",
    b"/?token=",
    b"/?token=x",
    b"/a?b?c",
    b"/#frag",
    b"/;x",
    b"/s/exp_001/step/99999999999999999999",
    b"/s/exp_001/step/-1",
    b"/s/exp_001/rollout/train/9.9",
    b"/s/exp_001/rollout/train/x",
    b"/s/exp_001/rollouts/train?step=1e999&min_reward=nan&start=99999999999999999",
    b"/s/exp_001/rollouts/train?step=" + b"9" * 5000,
    b"/s/exp_001/rollouts/train?min_reward=inf&max_tokens=99999999999999999999999",
    b"/s/exp_001/rollouts/train?sort=evil&text=%ff%00",
    b"/s/exp_001/rollouts/train?step=99999999999&task_index=-99999999999",
    b"/s/exp_001/rollout/train/0.0?chain=99&tokens=999999999&color=x",
    b"/s/exp_001/text/train/0.0?message=99",
    b"/s/exp_001/text/train/0.0?start=99999999999",
    b"/s/none",
    b"/s",
    b"/s/",
    b"/compare",
    b"/compare?a=x&b=y",
    b"/compare?a=exp_001&b=exp_001",
    b"/events",
    b"/events?source=none",
    b"/s/exp_001/group/none",
    b"/s/exp_001/group/train?like=9.9",
    b"/s/exp_001/group/train?step=x",
    b"/s/exp_001/validation?first=x&start=-1",
    b"/" + b"a" * 7000,
    b"/" + b"a" * 9000,
    b"/sessions/x",
    b"/v1/chat/completions",
    b"/sessions/%2e%2e/v1/chat/completions",
    b"/v1beta/models/x:generateContent?key=%ff",
]
RAW = [
    b"\r\n\r\n",
    b"garbage\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/2.0\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 64 + b"\r\n\r\n",
    b"GET  /  HTTP/1.1\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"G\x00T / HTTP/1.1\r\n\r\n",
    get(b"/", b"Bad Header: x\r\n"),
    get(b"/", b": x\r\n"),
    get(b"/", b"nocolon\r\n"),
    get(b"/", b"A: \x00\r\n"),
    get(b"/", b"A: b\nC: d\r\n"),
    get(b"/", b" folded\r\n"),
    get(b"/", b"A: " + b"x" * 9000 + b"\r\n"),
    get(b"/", b"".join(b"A%d: x\r\n" % i for i in range(2000))),
    get(b"/", b"Host: evil\r\n"),
    get(b"/", b"Cookie: " + b";" * 5000 + b"\r\n"),
    get(b"/", b"Cookie: a=\xff; $Version\r\n"),
    get(b"/", b"Origin: null\r\n"),
    get(b"/", b"Range: bytes=99-1\r\n"),
    get(b"/static/app.css", b"Range: bytes=99999999-1\r\n"),
    get(b"/static/app.css", b"If-Modified-Since: never\r\n"),
    get(b"/", b"Expect: 200-ok\r\n"),
    get(b"/", b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
    get(b"/", b"Last-Event-ID: \xff\r\n"),
    post(b"Content-Length: -1\r\n"),
    post(b"Content-Length: x\r\n"),
    post(b"Content-Length: 99999999999999999999\r\n"),
    post(b"Content-Length: 5\r\nContent-Length: 6\r\n", b"abcde"),
    post(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
    post(b"Transfer-Encoding: chunked\r\n", b"zz\r\nabc\r\n0\r\n\r\n"),
    post(b"Transfer-Encoding: chunked\r\n", b"-5\r\nabc\r\n0\r\n\r\n"),
    post(b"Transfer-Encoding: chunked\r\n", b"FFFFFFFFFFFFFFFFFF\r\nabc"),
    post(b"Transfer-Encoding: gzip\r\n", b"x"),
    post(b"Content-Encoding: gzip\r\nContent-Length: 5\r\n", b"nogzp"),
    post(b"Content-Encoding: br\r\nContent-Length: 5\r\n", b"nobro"),
    post(b"Content-Encoding: deflate\r\nContent-Length: 5\r\n", b"nodef"),
    post(b"Content-Length: 10\r\n", b"abc"),
    get(b"/", method=b"TRACE"),
    get(b"/", method=b"CONNECT"),
    get(b"/", method=b"EVIL"),
    get(b"/", method=b"M" * 5000),
    get(b"/", method=b"OPTIONS"),
]
REQUESTS = [*map(get, TARGETS), *RAW]


async def echo(request: web.Request) -> web.Response:
    return web.json_response({"path": request.path, "body": (await request.read()).decode(errors="replace")})


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    listener = open_listener("127.0.0.1", 0, key="host")
    accepting = await accept(runner.server, listener, max_connections=64)
    try:
        yield listener.getsockname()[1]
    finally:
        accepting.close()
        await runner.cleanup()


@asynccontextmanager
async def plain(directory: Path) -> AsyncIterator[int]:
    app = web.Application(middlewares=[Guard("127.0.0.1").middleware])
    app.router.add_route("*", "/{path:.*}", echo)
    async with listening(app) as port:
        yield port


@asynccontextmanager
async def viewer(directory: Path) -> AsyncIterator[int]:
    rows = [rollout(1)]
    write_run(directory / "runs/exp_001", metrics=[{"step": 1, "train/reward": 1.0}], train=rows, validation=rows)
    sources = ViewerSources.open([directory / "runs"], cache=directory / "cache")
    sources.get("exp_001").complete()
    async with listening(Viewer(sources, "t").app) as port:
        yield port


@asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[int]:
    server = await started(FakeGeneration(), "qwen3")
    try:
        yield urlsplit(server.base_url).port or 0
    finally:
        await server.close()


@asynccontextmanager
async def routed(directory: Path) -> AsyncIterator[int]:
    async with plain(directory) as member:
        router = await Router.start([f"127.0.0.1:{member}"])
        try:
            yield router.port
        finally:
            await router.close()


async def send(port: int, data: bytes) -> bytes:
    """Return the answer; b"" if the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        answer = asyncio.ensure_future(reader.read())
        await asyncio.wait([answer], timeout=UNFINISHED_S)
        if not answer.done():
            writer.write_eof()
        return await asyncio.wait_for(answer, ANSWER_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("serve", [plain, viewer, gateway, routed])
def test_malformed_requests_get_an_answer_and_one_line_in_the_log(
    serve: Callable[[Path], AbstractAsyncContextManager[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    failures: list[tuple[bytes, object]] = []

    async def main() -> None:
        async with serve(tmp_path) as port:
            for data in REQUESTS:
                caplog.clear()
                try:
                    answer = await send(port, data)
                except TimeoutError:
                    failures.append((data[:80], "no answer"))
                    continue
                lines = [record.getMessage() for record in caplog.records]
                is_fault = answer.startswith(b"HTTP/1.1 5") or any(record.exc_info for record in caplog.records)
                if is_fault or len(lines) > 1 or any(len(line.splitlines()) > 1 for line in lines):
                    failures.append((data[:80], (answer[:40], lines)))
            assert (await send(port, get(b"/"))).startswith(b"HTTP/1.1 ")

    asyncio.run(main())
    assert not failures, "\n".join(map(str, failures))


def test_there_are_100_malformed_requests() -> None:
    assert len(REQUESTS) >= 100
