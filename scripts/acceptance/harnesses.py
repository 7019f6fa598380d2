"""Command-line harnesses as they come, each in a session over the gateway; a table for docs/agents.md.

uv run scripts/acceptance/harnesses.py                  all
uv run scripts/acceptance/harnesses.py codex qwen       some
uv run scripts/acceptance/harnesses.py --installed DIR  with those that are installed in DIR already

The script installs the harnesses, with the versions below, into a directory of its own, and runs
tests/support/harness_sessions.py on the entries of examples/agents/harnesses. Gateway and harness run in a network
namespace that has a loopback interface alone (`unshare`). A session is right if the policy read what only the harness's
tool could show it, and every history is, token for token, what the engine was given and sampled.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NPM = {
    "claude": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.171.0",
    "gemini": "@google/gemini-cli@0.61.0",
    "opencode": "opencode-ai@1.18.33",
    "qwen": "@qwen-code/qwen-code@0.24.4",
}
PYPI = {"mini_swe_agent": "mini-swe-agent==2.4.6", "openhands": "openhands==1.16.0"}  # the latter on Python 3.12
INSTALL_S, SESSION_S = 900.0, 180.0
ISOLATE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def install(directory: str, names: Sequence[str]) -> None:
    """Install harnesses; one that cannot be installed ends the script with the installer's error."""
    commands = [["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", directory]]
    commands[0] += [NPM[name] for name in names if name in NPM]
    for name in names:
        if name in PYPI:
            python = "3.12" if name == "openhands" else sys.executable
            commands.append(["uv", "venv", "-q", "--python", python, f"{directory}/{name}"])
            # Compiled: a container cannot write into the environment, and each run would compile all that it imports.
            install = ["uv", "pip", "install", "-q", "--compile-bytecode"]
            commands.append([*install, "--python", f"{directory}/{name}/bin/python", PYPI[name]])
    for command in commands:
        subprocess.run(command, check=True, timeout=INSTALL_S)


async def run(name: str) -> bool:
    """Run one harness, print its row, and return whether it is right."""
    from tests.support.harness_sessions import find_harness, run_session

    program = find_harness(name)
    assert program is not None, name
    seen = await asyncio.wait_for(run_session(name, program), SESSION_S)
    is_right = not seen.error and seen.has_read and not seen.rewritten and set(seen.untrained) <= {"A title"}
    size = len(seen.prompts[0]) if seen.prompts else 0
    counts = f"{seen.num_calls} | {len(seen.untrained)} | {len(seen.chains)} | {size}"
    print(f"| {NPM.get(name) or PYPI[name]} | {counts} | {is_right} |", flush=True)
    if not is_right:
        print(f"{name}: {seen.error} read: {seen.has_read}", *(p[-2000:] for p in seen.prompts), file=sys.stderr)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="names of files in examples/agents/harnesses; all by default")
    parser.add_argument("--installed", help="a directory that the script has installed to before")
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)  # in the namespace already
    arguments = parser.parse_args()
    names = arguments.what or [*NPM, *PYPI]
    if arguments.isolated:
        print("| harness | calls | side calls | histories | bytes of the first prompt | as it should |", flush=True)
        print("|---|---|---|---|---|---|", flush=True)
        return 0 if min([asyncio.run(run(name)) for name in names]) else 1
    with tempfile.TemporaryDirectory() as directory:
        if arguments.installed is None:
            install(directory, names)
        root = str(Path(arguments.installed or directory).resolve())
        environment = {**os.environ, "NEMO_RL_HARNESSES": root, "PYTHONPATH": str(Path(__file__).parents[2])}
        again = [sys.executable, __file__, "--isolated", *names]
        return subprocess.run([*ISOLATE, *again], check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
