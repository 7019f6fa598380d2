"""A listening socket that takes no more connections than it was told to."""

import asyncio
import logging
import socket

from aiohttp import web

BACKLOG = 1024  # connections that wait to be accepted

logger = logging.getLogger(__name__)


async def accept(server: web.Server, listener: socket.socket, *, max_connections: int) -> asyncio.Server:
    """Serve what connects to `listener`. What comes beyond `max_connections` is hung up on, for clients to try again;
    without a limit the process would run out of files, wherever it opens the next one."""

    def protocol() -> asyncio.BaseProtocol:
        return _ConnectionRejector() if len(server.connections) >= max_connections else server()

    return await asyncio.get_running_loop().create_server(protocol, sock=listener, backlog=BACKLOG)


class _ConnectionRejector(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        logger.warning("hung up on %s: too many connections", transport.get_extra_info("peername"))
        transport.close()
