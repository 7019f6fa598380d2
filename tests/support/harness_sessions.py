"""Real harnesses, each by its entry in examples/agents/harnesses, against a gateway whose policy is a script.

The policy calls the harness's tool for shell commands to read a file, and then ends. `run_session` returns what was
seen; scripts/acceptance/harnesses.py installs the harnesses and prints a table of it.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.environments.harness import HarnessConfig
from nemo_rl.experience.command_agent import HarnessAgent
from nemo_rl.gateway.server import GatewayServer
from nemo_rl.gateway.sessions import Chain
from nemo_rl.gateway.side_calls import make_side_call_test
from nemo_rl.types import Message, Prompt
from tests.fakes.generation import FakeGeneration
from tests.unit.gateway.engines import SpeakingGeneration, started, text_of

DIRECTORY = Path(__file__).parents[2] / "examples" / "agents" / "harnesses"
INSTALLED = "NEMO_RL_HARNESSES"  # environment variable: a directory with node_modules, or a virtual environment in it
NAMES = tuple(sorted(path.stem for path in DIRECTORY.glob("*.yaml")))
TEMPLATE = "qwen3"
MAX_MODEL_LEN = 1_000_000  # bytes; a harness's first prompt has up to some hundred thousand
QUESTION = "Which word is in note.txt? Read it with a shell command, and say it."
COMMAND = "cat note.txt"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent ends
SHELLS = ("Bash", "bash", "exec_command", "shell_command", "shell", "run_shell_command", "execute_bash", "terminal")
SECTION_KEYS = ("command", "files", "variables", "side_calls")


@dataclass(frozen=True)
class Seen:
    """What one harness did."""

    chains: tuple[Chain, ...]
    num_calls: int
    prompts: tuple[str, ...]  # of each call
    untrained: tuple[str, ...]  # sampled texts that are on no history, side calls included
    rewritten: int  # histories that are not the prompt and response of their last call
    has_read: bool  # the harness showed the policy what only its tool could know
    error: str = ""


def load_entry(name: str) -> dict[str, Any]:
    """Return the entry of `env` in a harness's file."""
    return yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text())["env"][name]


def find_harness(name: str) -> str | None:
    """Return the path of a harness's program, if it is installed."""
    program = Path(load_entry(name)["command"][0]).name
    root = Path(os.environ.get(INSTALLED, "/nonexistent"))
    places = [str(root / "node_modules" / ".bin"), *(str(path) for path in sorted(root.glob("*/bin")))]
    return shutil.which(program, path=os.pathsep.join(places)) or shutil.which(program)


def section_of(name: str, program: str, **keys: Any) -> HarnessConfig:
    """Return the keys of an entry that say how its harness is started, with `program` as it is installed here."""
    entry = load_entry(name)
    given = {key: entry[key] for key in SECTION_KEYS if key in entry} | keys
    return HarnessConfig.model_validate(given | {"command": [program, *given["command"][1:]]})


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a tool call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def described_tools(prompt: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each function that the prompt offers."""
    lines = prompt.split("<tools>", 1)[-1].split("</tools>", 1)[0].splitlines() if "</tools>" in prompt else []
    functions = [json.loads(line)["function"] for line in lines if line.startswith("{")]
    return {each["name"]: each.get("parameters") or {} for each in functions}


def run_shell(prompt: str, command: str) -> str | None:
    """Return a call of the tool that runs shell commands; None if the prompt offers none."""
    tools = {name: tool for name, tool in described_tools(prompt).items() if name in SHELLS}
    if not tools:
        return None
    name, schema = next(iter(tools.items()))
    properties = schema.get("properties", {})
    key = next(key for key in ("command", "cmd") if key in properties)
    value: Any = ["sh", "-c", command] if properties[key].get("type") == "array" else command
    needed = {each: properties[each] for each in schema.get("required", ()) if each != key}
    defaults: dict[str, Any] = {"boolean": False, "integer": 1}
    others = {each: (of.get("enum") or [defaults.get(of.get("type"), "as asked")])[0] for each, of in needed.items()}
    return call_text(name, {key: value, **others})


def answer(prompt: str) -> str:
    """Call the shell tool that the prompt describes, then say what it wrote."""
    conversation = prompt.split("</tools>", 1)[-1]
    results = re.findall(r"<tool_response>(.*?)</tool_response>", conversation, re.DOTALL)
    if not results:
        return run_shell(prompt, COMMAND) or "A title"  # a call beside the task
    if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in prompt.partition("<tool_response>")[0]:
        return run_shell(prompt, SUBMIT) or ""
    found = re.search(r"word-[0-9a-f]{8}", results[-1])
    return f"The word is {found.group() if found else 'unknown'}."


class Recorded(SpeakingGeneration):
    """A scripted engine that keeps what it was asked and what it answered."""

    def __init__(self) -> None:
        super().__init__(TEMPLATE, lambda request, prompt: self.say(prompt))
        self.said: list[tuple[str, str]] = []

    def say(self, prompt: str) -> str:
        self.said.append((prompt, answer(prompt)))
        return self.said[-1][1]


async def serve(engine: FakeGeneration) -> GatewayServer:
    """Start a gateway with room for the prompts of any harness."""
    return await started(engine, TEMPLATE, max_model_len=MAX_MODEL_LEN, max_new_tokens=4096)


async def run_session(name: str, program: str) -> Seen:
    """Run a harness once, in a working directory with a note whose word nothing else has."""
    word = f"word-{secrets.token_hex(4)}"
    note = {"path": "{workdir}/note.txt", "content": f"{word}\n"}
    section = section_of(name, program, files=[*load_entry(name).get("files", ()), note])
    engine = Recorded()
    server = await serve(engine)
    try:
        session_id = server.open_session(seed=1, is_side_call=make_side_call_test(section.side_calls))
        prompt = Prompt(prompt_id="p", task_name="task", messages=(Message("user", QUESTION),), env_state={})
        error = ""
        try:
            await HarnessAgent(section).run(prompt, server.session_url(session_id), session_id)
        except Exception as failure:  # of code of others
            error = f"{type(failure).__name__}: {failure}"
        chains = server.close_session(session_id).chains()
    finally:
        await server.close()
    return judge(chains, engine.said, word, error)


def judge(chains: Sequence[Chain], said: Sequence[tuple[str, str]], word: str, error: str) -> Seen:
    """Compare the histories with what the engine was given and answered."""
    whole = {prompt + answered for prompt, answered in said}
    histories = [text_of(TEMPLATE, [i for m in chain.message_log for i in m.token_ids]) for chain in chains]
    stop = "<|im_end|>"
    trained = [
        text_of(TEMPLATE, m.token_ids).removesuffix(stop) for c in chains for m in c.message_log if m.is_generated
    ]
    return Seen(
        tuple(chains),
        len(said),
        tuple(prompt for prompt, _ in said),
        tuple(answered for _, answered in said if answered not in trained),
        sum(history.removesuffix(stop) not in whole for history in histories),
        any(word in m.message.content for c in chains for m in c.message_log if not m.is_generated),
        error,
    )
