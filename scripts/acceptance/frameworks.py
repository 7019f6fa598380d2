"""Official clients and agent frameworks, each in a session of tools over the gateway; a table for docs/agents.md.

uv run scripts/acceptance/frameworks.py                      all of them
uv run scripts/acceptance/frameworks.py litellm:messages     those whose name begins so: `framework:api[:stream]`
uv run scripts/acceptance/frameworks.py --engine vllm        on SmolLM2-135M-Instruct in place of the script

The script makes an environment for the frameworks, with the versions below, and answers them from a script: a call of
a tool with thinking, another with text, then two at once in a second question. A session is right where the client
returned both answers and every history is, token for token, what the engine was given and sampled.

SmolLM2 calls no tool of its own, so on vLLM each client demands a call in its first request of a question
(`gateway.forced_tool_choice: guided`), and the framework runs what the model wrote. There a session is right where each
question had such a call and an answer, and every history is exact.
"""

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripted_policy import Recorded, Session, calculate, judge, run_client, scripted, serve, serve_model

from nemo_rl.gateway.server import GatewayServer

PACKAGES = (
    "openai-agents==0.24.0",
    "langgraph==1.2.22",
    "langchain-openai==1.7.3",
    "smolagents==1.26.0",
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "litellm==1.83.0",
    "google-genai==3.3.0",
)
CLIENTS = Path(__file__).with_name("framework_clients.py")
ANSWERS = ["It is 35.", "It is 70, and 3."]
EXAMPLES = """Answer each question by a call of a tool, as in these examples.
Question: What is 1 + 2?
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
Question: What is 6 * 5?
<tool_call>
{"name": "multiply", "arguments": {"a": 6, "b": 5}}
</tool_call>
Question: What is 7 + 8?
<tool_call>
{"name": "add", "arguments": {"a": 7, "b": 8}}
</tool_call>"""
INSTALL_S, CLIENT_S = 900.0, 600.0
NAMES = (
    *("openai:chat", "anthropic:messages", "google-genai:gemini"),
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


async def run_all(names: Sequence[str], python: str) -> bool:
    """Run clients on scripted answers, and return whether all are right."""
    passed = True
    for name in names:
        engine = scripted(calculate)
        async with serve(engine) as server:
            answers, seen = await run(name, python, server, engine)
        is_right = answers == ANSWERS and seen.is_exact
        passed &= report(name, answers, seen, is_right)
    return passed


async def run_all_on_vllm(names: Sequence[str], python: str) -> bool:
    """Run clients on a model, one after another, and return whether each session is right."""
    passed = True
    with tempfile.TemporaryDirectory() as directory:
        async with serve_model(Path(directory)) as (server, engine):
            for name in names:
                engine.sampled.clear()
                answers, seen = await run(name, python, server, engine, CLIENT_SYSTEM=EXAMPLES, CLIENT_FORCES="1")
                num_forced = sum(request.sampling.guide is not None for request, _ in engine.sampled)
                is_right = seen.is_exact and len(answers) == len(ANSWERS) <= num_forced
                passed &= report(name, answers, seen, is_right)
    return passed


async def run(
    name: str, python: str, server: GatewayServer, engine: Recorded, **variables: str
) -> tuple[list[str], Session]:
    """Run one client; return its answers, or the last line of its error, and what the gateway recorded."""
    session_id = server.open_session(seed=1, trains=False)  # forced calls are recorded like all others
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OPENAI_BASE_URL": server.session_url(session_id), "OPENAI_API_KEY": "unused", **variables}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # which it would fetch otherwise
    try:
        status, output, errors = await run_client([python, str(CLIENTS), name], environment, timeout_s=CLIENT_S)
    except TimeoutError:
        status, output, errors = 1, "", f"it did not end in {CLIENT_S:g} s"
    if status:
        print(errors, file=sys.stderr)
    answers = json.loads(output.splitlines()[-1]) if status == 0 else errors.strip().splitlines()[-1:]
    return answers, judge(server.close_session(session_id).chains(), engine.sampled)


def report(name: str, answers: Sequence[str], seen: Session, passed: bool) -> bool:
    counts = f"{seen.num_calls} | {seen.num_tool_results} | {seen.num_histories} | {seen.sampled}"
    print(f"| {name} | {counts} | {passed} |", flush=True)
    print(f"{name}: {answers}{'' if passed else seen}", file=sys.stderr)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*")
    parser.add_argument("--engine", choices=["vllm"], help="SmolLM2 in place of the script")
    parser.add_argument("--python", help="an interpreter that has the frameworks already")
    parser.add_argument("--calls", action="store_true", help="log each call of the engine")
    arguments = parser.parse_args()
    if arguments.calls:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    every = [name for each in NAMES for name in (each, f"{each}:stream")]
    names = [name for name in every if name.startswith(tuple(arguments.what or [""]))]
    with tempfile.TemporaryDirectory() as directory:
        python = arguments.python or make_environment(directory)
        print("| client | calls | tool results | histories | tokens | as it should |", flush=True)
        print("|---|---|---|---|---|---|", flush=True)
        work = run_all_on_vllm(names, python) if arguments.engine else run_all(names, python)
        return 0 if asyncio.run(work) and names else 1


if __name__ == "__main__":
    sys.exit(main())
