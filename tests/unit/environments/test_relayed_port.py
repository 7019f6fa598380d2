"""The gateway's port in a container, without the container: this process passes the listening socket."""

import asyncio
import errno
import socket
from typing import Any

import pytest

from nemo_rl.environments.ecosystem.relayed_port import MAX_CONNECTIONS, relay

DEADLINE_S = 120.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    writer.close()


async def send(port: int) -> bytes:
    """What comes back of one message."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"hi")
        connection.shutdown(socket.SHUT_WR)
        try:
            return await loop.sock_recv(connection, 9)
        except ConnectionError:  # closed with the message unread
            return b""


def test_a_connection_that_fails_is_closed_and_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = asyncio.open_connection

    async def fail(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    async def main() -> None:
        gateway = await asyncio.start_server(echo, "127.0.0.1", 0)
        base_url = f"http://127.0.0.1:{gateway.sockets[0].getsockname()[1]}/v1"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()[1]
            async with gateway, relay(base_url) as port:
                with socket.socket(fileno=port.pass_fds[0]) as channel:
                    socket.send_fds(channel, [b"."], [listener.fileno()])
                    channel.detach()
                monkeypatch.setattr(asyncio, "open_connection", fail)
                assert [await send(address) for _ in range(MAX_CONNECTIONS)] == [b""] * MAX_CONNECTIONS
                monkeypatch.setattr(asyncio, "open_connection", usual)
                assert await send(address) == b"hi"

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
