"""Whatever a client sends costs only itself: it gets its error, and another client is served meanwhile."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from nemo_rl.gateway.server import GatewayServer, ServerSettings
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.test_server import HI, call_of, serve

SMALL = ServerSettings(max_body_bytes=100_000)
GOOD = json.dumps({"messages": [HI]}).encode()


def deep(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


BODIES: dict[str, tuple[bytes, dict[str, str], int]] = {
    "huge": (b'{"messages": "' + b"a" * 200_000 + b'"}', {}, 413),
    "no JSON": (b"messages=hi", {}, 400),
    "cut": (GOOD[:-2], {}, 400),
    "no object": (b"[1]", {}, 400),
    "nested": (deep(40_000), {}, 400),
    "nested tool": (GOOD[:-1] + b', "tools": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", {}, 400),
    "long number": (GOOD[:-1] + b', "n": ' + b"1" * 50_000 + b"}", {}, 400),
    "not UTF-8": (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', {}, 400),
    "half a surrogate pair": (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', {}, 400),
    "many messages": (json.dumps({"messages": [{"role": "user"}] * 5_001}).encode(), {}, 400),
    "many unknown fields": (json.dumps({"messages": [HI], **{f"x{i}": i for i in range(3_000)}}).encode(), {}, 200),
    "no gzip": (GOOD, {"Content-Encoding": "gzip"}, 400),
    "a gzip bomb": (gzip.compress(b" " * 50_000_000), {"Content-Encoding": "gzip"}, 413),
}


async def is_served(server: GatewayServer) -> None:
    status, body = await call_of(server, "POST", "/v1/chat/completions", data=GOOD)
    assert (status, body["object"]) == (200, "chat.completion")


@pytest.mark.parametrize("kind", BODIES)
def test_a_hostile_body_gets_an_error_and_others_their_answers(kind):
    body, headers, expected = BODIES[kind]

    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1/chat/completions"
        status, answer = await call_of(server, "POST", path, data=body, headers=headers)
        assert status == expected
        assert expected == 200 or set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(json.dumps(answer)) < 3_000
        await is_served(server)

    serve(FakeGeneration(), use, settings=SMALL, max_new_tokens=8)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/completions", 404),
        ("POST", "/sessions/a%2Fb/v1/chat/completions", 404),
        ("GET", "/sessions/%00", 404),
        ("DELETE", "/sessions/unknown", 404),
        ("POST", "/sessions/unknown/reward", 404),
    ],
)
def test_wrong_addresses_have_the_envelope(method, path, expected):
    async def use(server: GatewayServer) -> None:
        status, answer = await call_of(server, method, path)
        assert (status, answer["error"]["type"]) == (expected, "invalid_request_error")

    serve(FakeGeneration(), use)


async def raw(server: GatewayServer, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(text)
    await writer.drain()
    return reader, writer


def head(length: int) -> bytes:
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def test_a_slow_body_is_408():
    async def use(server: GatewayServer) -> None:
        reader, writer = await raw(server, head(len(GOOD)) + GOOD[:5])
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()

    serve(FakeGeneration(), use, settings=ServerSettings(body_timeout_s=0.1))


def test_a_client_that_waits_with_its_body_keeps_nobody_waiting():
    async def use(server: GatewayServer) -> None:
        _, writer = await raw(server, head(len(GOOD)) + GOOD[:5])
        await is_served(server)
        writer.close()

    serve(FakeGeneration(), use)


@pytest.mark.parametrize(
    "text", [b"\x16\x03\x01 hello over TLS", b"GET / HTTP/9.9\r\n\r\n", head(100) + b"{", b"", b"a" * 20_000]
)
def test_a_client_that_speaks_nonsense_or_leaves_disturbs_nobody(text):
    async def use(server: GatewayServer) -> None:
        _, writer = await raw(server, text)
        writer.close()
        await is_served(server)

    serve(FakeGeneration(), use, settings=SMALL)


def test_many_hostile_clients_at_once_leave_nothing_behind():
    async def use(server: GatewayServer) -> None:
        path = f"/sessions/{server.open_session()}/v1/chat/completions"

        async def attack(kind: str) -> int:
            body, headers, _ = BODIES[kind]
            return (await call_of(server, "POST", path, data=body, headers=headers))[0]

        kinds = [kind for kind in BODIES if kind not in ("a gzip bomb", "many unknown fields")] * 3
        statuses: list[Any] = await asyncio.gather(*map(attack, kinds), *[is_served(server) for _ in range(8)])
        assert set(statuses[: len(kinds)]) <= {400, 413}
        assert (await call_of(server, "GET", "/health"))[1]["calls"] == 0

    serve(FakeGeneration(), use, settings=SMALL)
