"""Command-line harnesses from npm as they are, each in a session over the gateway; a table for docs/agents.md.

uv run scripts/acceptance/harnesses.py                  both
uv run scripts/acceptance/harnesses.py codex            one
uv run scripts/acceptance/harnesses.py --modules DIR    with the packages that are installed in DIR already

The script installs the packages, with the versions below, into a directory of its own, and answers a harness from a
script: a shell command by its tool, then what that wrote. Gateway and harness run in a network namespace that has a
loopback interface alone (`unshare`). A session is right where the harness printed the word that only its tool could
know and every history is, token for token, what the engine was given and sampled.
"""

import argparse
import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = {"codex": "@openai/codex@0.169.0", "claude": "@anthropic-ai/claude-code@2.1.197"}
APIS = {"codex": "responses", "claude": "messages"}
QUESTION = "Which word is in note.txt? Read it with a shell command."
COMMAND = "cat note.txt"
SHELLS = ("Bash", "exec_command", "shell_command", "shell")  # the tools by which the harnesses run a command
INSTALL_S, CLIENT_S = 600.0, 120.0
ISOLATE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def install(directory: str, names: Sequence[str]) -> None:
    """Install the harnesses' packages; one that cannot be installed ends the script with npm's error."""
    packages = [PACKAGES[name] for name in names]
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", directory, *packages]
    subprocess.run(command, check=True, timeout=INSTALL_S)


def answer(prompt: str) -> str:
    """Call the shell tool that the prompt describes, then say what it wrote."""
    from scripted_policy import call_text

    conversation = prompt.split("</tools>", 1)[-1]
    if results := re.findall(r"<tool_response>(.*?)</tool_response>", conversation, re.DOTALL):
        found = re.search(r"word-[0-9a-f]{8}", results[-1])
        return f"The word is {found.group() if found else 'unknown'}."
    tools = {name: tool for name, tool in described_tools(prompt).items() if name in SHELLS}
    if not tools:
        return "No tool runs a command here."  # a call beside the conversation, such as one for its title
    name, properties = next(iter(tools.items()))
    key = next(key for key in ("command", "cmd") if key in properties)
    value = ["sh", "-c", COMMAND] if properties[key].get("type") == "array" else COMMAND
    arguments = {key: value, **({"description": "Read the note"} if "description" in properties else {})}
    return "I will read it.\n" + call_text(name, arguments)


def described_tools(prompt: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return the properties of each function that the prompt offers."""
    lines = prompt.split("<tools>", 1)[-1].split("</tools>", 1)[0].splitlines() if "</tools>" in prompt else []
    functions = [json.loads(line)["function"] for line in lines if line.startswith("{")]
    return {each["name"]: (each.get("parameters") or {}).get("properties", {}) for each in functions}


def command_of(name: str, modules: str, url: str) -> list[str]:
    binary = str(Path(modules).resolve() / "node_modules" / ".bin" / name)
    if name == "claude":
        return [binary, "-p", QUESTION, "--model", "policy", "--allowedTools", "Bash"]
    provider = f'{{name="gateway", base_url="{url}", wire_api="responses", env_key="OPENAI_API_KEY"}}'
    settings = ("-c", "model_provider=gateway", "-c", f"model_providers.gateway={provider}", "-m", "policy")
    settings += ("-c", 'web_search="disabled"')  # a tool that OpenAI's servers run
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return [binary, "exec", *flags, *settings, QUESTION]


def environment_of(name: str, home: str, root: str, key: str) -> dict[str, str]:
    """Return a harness's environment: its home is a directory of this run; Claude Code finds its session by its key."""
    own = {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", "OPENAI_API_KEY": key}
    if name == "claude":
        own |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": key, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    return own


async def run(name: str, modules: str) -> bool:
    """Run one harness, print its row, and return whether it is right."""
    from scripted_policy import judge, run_client, scripted, serve

    word = f"word-{secrets.token_hex(4)}"
    engine = scripted(answer)
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "note.txt").write_text(f"{word}\n")
        async with serve(engine) as server:
            session_id = server.open_session(seed=1)
            command = command_of(name, modules, server.session_url(session_id))
            environment = environment_of(name, home, server.base_url, session_id)
            status, output, errors = await run_client(command, environment, timeout_s=CLIENT_S, cwd=directory)
            seen = judge(server.close_session(session_id).chains(), engine.sampled)
    passed = status == 0 and word in output and seen.is_exact
    package = PACKAGES[name]
    print(f"| {package} | {APIS[name]} | {seen.num_calls} | {seen.num_histories} | {passed} |", flush=True)
    if not passed:
        print(f"{name}: exit status {status}, {seen}\n{output[-3000:]}\n{errors[-3000:]}", file=sys.stderr)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="of codex and claude; both by default")
    parser.add_argument("--modules", help="a directory whose node_modules has the packages")
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)  # in the namespace already
    arguments = parser.parse_args()
    names = arguments.what or list(PACKAGES)
    if arguments.isolated:
        print("| harness | API | calls | histories | as it should |\n|---|---|---|---|---|", flush=True)
        return 0 if min([asyncio.run(run(name, arguments.modules)) for name in names]) else 1
    with tempfile.TemporaryDirectory() as directory:
        if arguments.modules is None:
            install(directory, names)
        modules = arguments.modules or directory
        again = [sys.executable, __file__, "--isolated", "--modules", modules, *names]
        return subprocess.run([*ISOLATE, *again], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
