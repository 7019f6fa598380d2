"""The guard of an HTTP server over real sockets: hosts, origins, tokens and deadlines."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import ClientSession, web

from nemo_rl.errors import ConfigError, escape
from nemo_rl.web import Guard, accept, is_exposed, make_token, open_listener

DEADLINE_S = 60.0


async def answer(request: web.Request) -> web.Response:
    return web.json_response({"path": request.path, "body": (await request.read()).decode()})


def serve(guard: Guard, use: Callable[[int], Awaitable[None]], *, headers_timeout_s: float = 30.0) -> None:
    """Run `use(port)` against a server that answers every path."""

    async def main() -> None:
        app = web.Application(middlewares=[guard.middleware])
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        assert runner.server is not None
        listener = open_listener("127.0.0.1", 0, key="host")
        port = listener.getsockname()[1]
        accepting = await accept(runner.server, listener, max_connections=64, headers_timeout_s=headers_timeout_s)
        try:
            await asyncio.wait_for(use(port), DEADLINE_S)
        finally:
            accepting.close()
            await runner.cleanup()

    asyncio.run(main())


async def status_of(port: int, path: str = "/x", **headers: str) -> int:
    """The status of a GET; an underscore in a header's name is a hyphen."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{port}{path}"
    async with ClientSession() as client, client.get(url, headers=named, allow_redirects=False) as response:
        return response.status


async def hung_up(reader: asyncio.StreamReader) -> bool:
    """Wait for the server to end the connection; whether it did so without an answer."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("[::1]:8000", 200),
        ("10.0.0.7:80", 200),  # an address is no name that could be bound anew
        ("proxy.example", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
        ("evil.example:127.0.0.1", 403),
        ("", 403),
    ],
)
def test_only_a_host_that_names_this_server_is_answered(host: str, status: int):
    async def use(port: int) -> None:
        assert await status_of(port, Host=host) == status

    serve(Guard("127.0.0.1", allowed_hosts=["proxy.example"]), use)


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *((host, True) for host in ("127.0.0.1:80", "127.8.8.8", "localhost:9", "LOCALHOST.:9", "[::1]:8")),
        *((host, False) for host in ("10.0.0.7:80", "[2001:db8::1]:8", "", "evil.example", "127.0.0.1.evil.example")),
    ],
)
def test_a_server_for_this_machine_alone_knows_loopback_names(host: str, is_known: bool):
    assert Guard("localhost", loopback_only=True).knows(host) is is_known


def test_pages_of_other_origins_are_refused():
    async def use(port: int) -> None:
        own = f"127.0.0.1:{port}"
        assert await status_of(port, Origin=f"http://{own}") == 200
        for origin in ("null", "http://evil.example", "http://127.0.0.1", f"http://{own}.evil.example", ""):
            assert await status_of(port, Origin=origin) == 403, origin

    serve(Guard("127.0.0.1"), use)


def test_a_token_is_needed_but_on_public_paths():
    async def use(port: int) -> None:
        assert await status_of(port, "/health") == 200
        assert await status_of(port) == 401
        assert await status_of(port, Authorization="Bearer s3cre") == 401
        assert await status_of(port, Authorization="Bearer ") == 401
        assert await status_of(port, Authorization="Bearer s3cret") == 200
        assert await status_of(port, "/x?token=s3cret") == 401  # no cookie: an address may end up in logs

    serve(Guard("127.0.0.1", token="s3cret", public_paths=("/health",)), use)


def test_a_browser_gets_the_token_as_a_cookie_and_an_address_without_it():
    async def use(port: int) -> None:
        async with ClientSession() as client:
            url = f"http://localhost:{port}/page?token=s3cret&run=1"
            async with client.get(url, allow_redirects=False) as response:
                assert (response.status, response.headers["Location"]) == (303, "/page?run=1")
                cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert await status_of(port, Cookie=f"viewer-{port}=s3cret") == 200
        assert await status_of(port, Cookie=f"viewer-{port}=wrong") == 401
        assert await status_of(port, Cookie=f"viewer-{port + 1}=s3cret") == 401  # of another server on this machine
        assert await status_of(port, "/page?token=wrong") == 401

    serve(Guard("127.0.0.1", token="s3cret", cookie="viewer"), use)


def test_a_redirect_that_takes_the_token_away_stays_on_this_server():
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET //evil.example/?token=s3cret HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"Location: /evil.example/\r\n" in await reader.readuntil(b"\r\n\r\n")
        writer.close()

    serve(Guard("127.0.0.1", token="s3cret", cookie="viewer"), use)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_request_without_an_end_of_headers_is_hung_up_on(sent: bytes):
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await hung_up(reader)
        writer.close()

    serve(Guard("127.0.0.1"), use, headers_timeout_s=0.2)


def test_the_deadline_of_headers_holds_for_the_next_request_of_a_connection_and_not_for_bodies():
    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\na")
        await asyncio.sleep(2.5)
        writer.write(b"b")
        assert b"200 OK" in await reader.readuntil(b'"ab"}')
        writer.write(b"GET /again HTTP/1.1\r\nHo")
        assert await hung_up(reader)
        writer.close()

    serve(Guard("127.0.0.1"), use, headers_timeout_s=2)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 300, "192.0.2.1", "127.0.0.1 "])
def test_an_address_that_cannot_be_bound_is_named(host: str):
    with pytest.raises(ConfigError, match=r"^gateway.host = .*(does not resolve|cannot be bound): .*allowed"):
        open_listener(host, 0, key="gateway.host").close()


def test_a_port_in_use_is_named():
    with open_listener("127.0.0.1", 0, key="port") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port = '127.0.0.1:{port}': cannot be bound: .*in use"):
            open_listener("127.0.0.1", port, key="port").close()


def test_control_characters_are_escaped_and_long_texts_are_cut():
    assert escape("a\n\x1b[2J\x7f\x9bé\u202e") == "a\\x0a\\x1b[2J\\x7f\\x9bé\\u202e"
    assert escape("x" * 9, limit=4) == "xxxx..."


def test_only_loopback_addresses_are_not_exposed():
    assert [host for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost") if is_exposed(host)] == []
    assert all(map(is_exposed, ("0.0.0.0", "::", "10.1.2.3", "node7")))
    assert len({make_token() for _ in range(9)}) == 9
