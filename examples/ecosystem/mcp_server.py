"""An MCP server with one tool for the policy and two that reward: `env.<name>.command: [python, THIS_FILE]`.

With `--port 8000` it serves HTTP, for `env.<name>.url: http://127.0.0.1:8000/mcp`; its counter is then of all rollouts.
"""

import argparse

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
count = 0  # of this process: of one rollout, where each has its own


@server.tool()
def add(a: int, b: int = 0) -> int:
    """Add both numbers to the counter, and return what it shows."""
    global count
    count += a + b
    return count


@server.tool()
def reward(number: int, answer: str) -> float:
    """Return 1 if the counter shows the number that the prompt names, and a half more if the answer says it."""
    return float(count == number) + (0.5 if str(number) in answer else 0.0)


@server.tool()
def spelling(word: str, answer: str) -> float:
    """Return 1 if the answer is the word spelled backward."""
    return float(answer.strip() == word[::-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int)
    port = parser.parse_args().port
    if port is None:
        server.run()
    else:
        server.run(transport="streamable-http", port=port)
