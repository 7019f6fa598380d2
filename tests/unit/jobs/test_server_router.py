"""The router, before real small servers."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from nemo_rl.jobs import server_router
from nemo_rl.jobs.server_router import Router

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NOBODY = "127.0.0.1:1"  # a port that nobody listens on


@asynccontextmanager
async def member(handler: Handler) -> AsyncIterator[str]:
    """The address of a server that answers with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


@asynccontextmanager
async def routed(*members: str) -> AsyncIterator[tuple[Router, aiohttp.ClientSession]]:
    router = await Router.start(members)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{router.port}") as client:
        yield router, client
    await router.close()


async def nothing(request: web.Request) -> web.Response:
    raise AssertionError("nobody should ask")


def test_what_a_member_is_asked_and_answers_is_passed_on() -> None:
    async def echo(request: web.Request) -> web.Response:
        said = {"path": request.path_qs, "key": request.headers.get("Authorization"), "body": await request.text()}
        return web.json_response(said, status=429, headers={"Retry-After": "7"})

    async def main() -> None:
        async with member(echo) as one, routed(one) as (_, client):
            path, headers = "/v1/chat/completions?a=b&c=1", {"Authorization": "Bearer x"}
            async with client.post(path, data="hello", headers=headers) as answer:
                assert await answer.json() == {"path": path, "key": "Bearer x", "body": "hello"}
                assert answer.status == 429
                assert answer.headers["Retry-After"] == "7"

    asyncio.run(main())


def test_each_request_goes_to_the_member_with_the_fewest() -> None:
    waiting: dict[str, int] = {"a": 0, "b": 0}

    async def main() -> None:
        release, all_there = asyncio.Event(), asyncio.Event()

        def busy(name: str) -> Handler:
            async def handler(request: web.Request) -> web.Response:
                waiting[name] += 1
                if sum(waiting.values()) == 6:
                    all_there.set()
                await release.wait()
                return web.Response(text=name)

            return handler

        async with member(busy("a")) as a, member(busy("b")) as b, routed(a, b) as (router, client):
            asked = [asyncio.create_task(client.get("/v1/models")) for _ in range(6)]
            await all_there.wait()
            assert waiting == {"a": 3, "b": 3}
            async with client.get("/health") as health:
                assert await health.json() == {"members": {a: 3, b: 3}}
            release.set()
            answers = [await (await task).text() for task in asked]
            assert sorted(answers) == ["a", "a", "a", "b", "b", "b"]
            assert set(router.load.values()) == {0}

    asyncio.run(main())


def test_an_answer_is_passed_on_in_parts_as_they_come() -> None:
    async def main() -> None:
        first_was_read = asyncio.Event()

        async def stream(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            await first_was_read.wait()
            await response.write(b"data: 2\n\n")
            return response

        async with member(stream) as one, routed(one) as (_, client), client.post("/v1/completions") as answer:
            assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
            first_was_read.set()
            assert await answer.read() == b"data: 2\n\n"

    asyncio.run(main())


def test_a_member_that_cannot_be_reached_is_passed_over() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="here")

    async def main() -> None:
        async with member(answer) as one, routed(NOBODY, one) as (_, client):
            for _ in range(3):
                assert await (await client.get("/v1/models")).text() == "here"

    asyncio.run(main())


def test_nobody_that_can_be_reached_and_a_broken_answer_are_errors_in_openais_form() -> None:
    async def broken(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def main() -> None:
        async with routed(NOBODY) as (_, client), client.get("/v1/models") as answer:
            assert answer.status == 503
            assert NOBODY in (await answer.json())["error"]["message"]
        async with member(broken) as one, routed(one) as (_, client), client.post("/v1/completions") as answer:
            assert answer.status == 502
            assert one in (await answer.json())["error"]["message"]

    asyncio.run(main())


def test_a_client_that_goes_away_ends_its_request_at_the_member() -> None:
    async def main() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def endless(request: web.Request) -> web.Response:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return web.Response()

        async with member(endless) as one, routed(one) as (_, client):
            asked = asyncio.create_task(client.post("/v1/completions"))
            await began.wait()
            asked.cancel()
            async with asyncio.timeout(120):
                await ended.wait()

    asyncio.run(main())


async def ask_raw(port: int, head: str, body: bytes = b"") -> str:
    """Send a request as it is; return its status line and the rest of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"{head}\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer.decode()


def test_target_in_absolute_form_is_its_path_and_no_target_is_a_failure_of_the_router() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(text=request.raw_path)

    async def main() -> None:
        async with member(echo) as one, routed(one) as (router, _):
            for target, path in (
                ("http://127.0.0.1:9/v1/models?a=%2F&b=c", "/v1/models?a=%2F&b=c"),
                ("/v1/models", "/v1/models"),
                ("//elsewhere/v1", "//elsewhere/v1"),
            ):
                answer = await ask_raw(router.port, f"GET {target} HTTP/1.1")
                assert answer.startswith("HTTP/1.1 200 "), (target, answer)
                assert answer.endswith(f"\r\n\r\n{path}")
            for request in (
                "OPTIONS * HTTP/1.1",
                "GET http://127.0.0.1 HTTP/1.1",
                "GET ftp://127.0.0.1/x HTTP/1.1",
                "CONNECT 127.0.0.1:80 HTTP/1.1",
            ):
                answer = await ask_raw(router.port, request)
                assert answer.startswith(("HTTP/1.1 400 ", "HTTP/1.1 404 ")), (request, answer)

    asyncio.run(main())


def test_body_beyond_the_limit_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_router, "MAX_BODY_BYTES", 1000)

    async def measure(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async def main() -> None:
        async with member(measure) as one, routed(one) as (_, client):
            async with client.post("/v1/completions", data=b"x" * 1000) as answer:
                assert await answer.text() == "1000"
            async with client.post("/v1/completions", data=b"x" * 1001) as answer:
                assert answer.status == 413
                message = (await answer.json())["error"]["message"]
                assert message == "the body of the request is larger than 1000 bytes, the router's limit"

    asyncio.run(main())


def test_compressed_body_is_bounded_and_passed_on_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_router, "MAX_BODY_BYTES", 1000)

    async def echo(request: web.Request) -> web.Response:
        return web.Response(text=await request.text())

    async def main() -> None:
        async with member(echo) as one, routed(one) as (_, client):
            headers = {"Content-Encoding": "gzip"}
            async with client.post("/v1/completions", data=gzip.compress(b"hello"), headers=headers) as answer:
                assert await answer.text() == "hello"
            async with client.post("/v1/completions", data=gzip.compress(bytes(100_000)), headers=headers) as answer:
                assert answer.status == 413

    asyncio.run(main())
