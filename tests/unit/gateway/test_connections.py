import asyncio
import contextlib

from nemo_rl.gateway.server import GatewayServer, ServerSettings
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.test_server import serve

ASK = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def answer_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The first line of the answer; empty where the server hung up."""
    with contextlib.suppress(ConnectionError):
        writer.write(ASK)
        await writer.drain()
        return await reader.readline()
    return b""


def test_connections_beyond_the_limit_are_hung_up_on_until_one_ends():
    async def use(server: GatewayServer) -> None:
        first = await asyncio.open_connection("127.0.0.1", server.port)
        assert (await answer_on(*first)).startswith(b"HTTP/1.1 200")
        second = await asyncio.open_connection("127.0.0.1", server.port)
        assert await answer_on(*second) == b""
        second[1].close()
        first[1].close()
        answer = b""
        while not answer:
            third = await asyncio.open_connection("127.0.0.1", server.port)
            answer = await answer_on(*third)
            third[1].close()
        assert answer.startswith(b"HTTP/1.1 200")

    serve(FakeGeneration(), use, settings=ServerSettings(max_connections=1))
