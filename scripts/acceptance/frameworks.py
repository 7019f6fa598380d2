"""Agent frameworks as they are, each in a session of tools over the gateway; a table for docs/agents.md.

uv run scripts/acceptance/frameworks.py                      all of them
uv run scripts/acceptance/frameworks.py litellm:messages     those whose name begins so: `framework:api[:stream]`

The script makes an environment for the frameworks, with the versions below, and answers them from a script: a call of
a tool with thinking, another with text, then two at once in a second question. A session is right where the client
returned both answers and every history is, token for token, what the engine was given and sampled.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripted_policy import calculate, judge, run_client, scripted, serve

PACKAGES = (
    "openai-agents==0.24.0",
    "langgraph==1.2.22",
    "langchain-openai==1.7.3",
    "smolagents==1.26.0",
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "litellm==1.83.0",
)
CLIENTS = Path(__file__).with_name("framework_clients.py")
ANSWERS = ["It is 35.", "It is 70, and 3."]
INSTALL_S, CLIENT_S = 900.0, 240.0
NAMES = (
    *("openai-agents:chat", "openai-agents:responses", "langgraph:chat", "langgraph:responses", "smolagents:chat"),
    *("pydantic-ai:chat", "pydantic-ai:responses", "pydantic-ai:messages"),
    *("litellm:chat", "litellm:responses", "litellm:messages"),
)


def make_environment(directory: str) -> str:
    """Install the frameworks into an environment of their own and return its interpreter."""
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, directory], check=True, timeout=INSTALL_S)
    python = str(Path(directory) / "bin" / "python")
    subprocess.run(["uv", "pip", "install", "-q", "--python", python, *PACKAGES], check=True, timeout=INSTALL_S)
    return python


async def run(name: str, python: str) -> bool:
    """Run one client, print its row, and return whether it is right."""
    engine = scripted(calculate)
    async with serve(engine) as server:
        session_id = server.open_session(seed=1)
        url = server.session_url(session_id)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "unused", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        status, output, errors = await run_client([python, str(CLIENTS), name], environment, timeout_s=CLIENT_S)
        seen = judge(server.close_session(session_id).chains(), engine.sampled)
    answers = json.loads(output.splitlines()[-1]) if status == 0 else errors.strip().splitlines()[-1:]
    passed = answers == ANSWERS and seen.is_exact
    print(f"| {name} | {seen.num_calls} | {seen.num_histories} | {seen.sampled} | {passed} |", flush=True)
    if not passed:
        print(f"{name}: {answers}, {seen}\n{errors[-3000:]}", file=sys.stderr)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[""])
    parser.add_argument("--python", help="an interpreter that has the frameworks already")
    arguments = parser.parse_args()
    names = [name for each in NAMES for name in (each, f"{each}:stream") if name.startswith(tuple(arguments.what))]
    with tempfile.TemporaryDirectory() as directory:
        python = arguments.python or make_environment(directory)
        print("| client | calls | histories | tokens | as it should |\n|---|---|---|---|---|", flush=True)
        passed = [asyncio.run(run(name, python)) for name in names]
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
