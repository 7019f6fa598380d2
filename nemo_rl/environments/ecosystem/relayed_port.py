"""The gateway's port in a container without a network: one address, to which the container's own loopback leads.

A launcher in the container's network namespace binds the port, passes the listening socket out and becomes the program.
This process accepts its connections, since a socket stays in the namespace in which it was made, and relays each to the
gateway. Nothing else can be reached from inside.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from yarl import URL

LOCALHOST = "127.0.0.1"
MAX_CONNECTIONS = 32  # concurrent connections per container; further ones are closed
CHUNK_BYTES = 65_536
# Arguments: descriptor, port, program and its arguments.
LAUNCHER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=64)
with socket.socket(fileno=int(sys.argv[1])) as channel:
    socket.send_fds(channel, [b"."], [listener.fileno()])
listener.close()
os.execvp(sys.argv[3], sys.argv[3:])
"""


class RelayedPort:
    """A port of a container, open until the block of `relay` ends."""

    def __init__(self, base_url: str, sender: socket.socket) -> None:
        """Use `relay`."""
        self._target = URL(base_url)
        self._sender = sender
        self._connections: set[asyncio.Task[None]] = set()
        self.num_connections = 0  # accepted so far

    @property
    def base_url(self) -> str:
        """Return the address inside of the container."""
        return str(self._target.with_host(LOCALHOST))

    @property
    def launcher(self) -> list[str]:
        """Return the arguments before a program's own that start it in the container."""
        return [interpreter(), "-I", "-S", "-c", LAUNCHER, str(self._sender.fileno()), str(self._target.port)]

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._sender.fileno(),)

    async def serve(self, channel: socket.socket) -> None:
        """Accept connections once the listening socket has arrived, until cancelled."""
        listener = await _receive_socket(channel)
        server = await asyncio.start_server(self._accept, sock=listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.num_connections += 1
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):  # the connection's end, or no descriptor is left
                if len(self._connections) <= MAX_CONNECTIONS:
                    await self._relay(reader, writer)
        finally:
            writer.close()
            self._connections.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_gateway, to_gateway = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            await asyncio.gather(_copy(reader, to_gateway), _copy(from_gateway, writer))
        finally:
            to_gateway.close()


@contextlib.asynccontextmanager
async def relay(base_url: str) -> AsyncIterator[RelayedPort]:
    """Relay a container's connections to the gateway at `base_url` while the block runs."""
    channel, sender = socket.socketpair()
    with channel, sender:
        channel.setblocking(False)
        port = RelayedPort(base_url, sender)
        serving = asyncio.ensure_future(port.serve(channel))
        try:
            yield port
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def interpreter() -> str:
    """Return the path of this Python without a virtual environment, as it is inside of the container, too."""
    return str(Path(sys.executable).resolve())


def interpreter_directories() -> Sequence[str]:
    """Return the directories that the launcher's Python needs."""
    return sorted({str(Path(sys.base_prefix).resolve()), str(Path(interpreter()).parent)})


async def _receive_socket(channel: socket.socket) -> socket.socket:
    """Return the socket that the launcher passes out."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(channel)
    _, (descriptor, *_), _, _ = socket.recv_fds(channel, 1, 1)
    return socket.socket(fileno=descriptor)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the sender ends, then end the receiver's half."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
