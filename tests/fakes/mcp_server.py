"""The MCP server of examples/ecosystem with tools that fail; started as a module from the repository's root."""

import io
import os
import time

from mcp.server.mcpserver import Image
from PIL import Image as Picture

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
def screenshot(of: int) -> list[Image | str]:
    """Take a picture."""
    file = io.BytesIO()
    Picture.new("RGB", (56, 56), (of, 20, 30)).save(file, "PNG")
    return ["screen:", Image(data=file.getvalue(), format="png"), Image(data=b"no picture", format="png")]


@server.tool()
def hang() -> str:
    """Never answer."""
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    server.run()
