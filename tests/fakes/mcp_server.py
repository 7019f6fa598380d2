"""The MCP server of examples/ecosystem with tools that fail; started as a module from the repository's root."""

import os
import time

from examples.ecosystem.mcp_server import server


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("out of paper")


@server.tool()
def die() -> str:
    """End the server."""
    os.write(2, b"killed by itself\n")
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answer."""
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    server.run()
