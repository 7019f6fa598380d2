"""An agent that is a command line: any program that reads OPENAI_BASE_URL trains without a change of its code."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from nemo_rl.data.openai_shape import to_openai_message
from nemo_rl.types import AgentResult, Prompt

TAIL_BYTES = 64 * 1024  # of a program's output: as much as is looked at


class CommandFailed(Exception):
    """The program ended with another status than 0; its text ends with what it wrote to standard error."""


class CommandAgent:
    """One process a run, in a process group of its own, which is killed when the run ends in whatever way.

    The program finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment and on its standard input one JSON object:
    `prompt_id`, `messages`, `env_state`, `tools`. If the last line that it writes is a JSON object with `reward` (a
    number) or `rewards` (numbers by name), that is its reward; `answer` is taken along.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self._name = name
        self._command = tuple(command)

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        # Files, not pipes: a child that outlives its program cannot hold its end open, and none is ever full.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            stdin.write(json.dumps(prompt_body(prompt), default=str).encode())
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
                start_new_session=True,
            )
            try:
                status = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if status:
                said = _tail(stderr).strip()
                last_line = said.splitlines()[-1] if said else "nothing on standard error"
                raise CommandFailed(f"exit status {status}: {last_line}\n{said}")
            return result_of_output(self._name, _tail(stdout))


def prompt_body(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a program reads it."""
    return {
        "prompt_id": prompt.prompt_id,
        "messages": [to_openai_message(message) for message in prompt.messages],
        "env_state": dict(prompt.env_state),
        "tools": [dict(tool) for tool in prompt.tools],
    }


def result_of_output(name: str, output: str) -> AgentResult:
    """The reward in the last line, where there is one: programs may write anything else."""
    lines = output.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        said = None
    if not isinstance(said, dict):
        return AgentResult()
    rewards = said.get("rewards")
    if not isinstance(rewards, dict):
        rewards = {name: said["reward"]} if "reward" in said else {}
    answer = said.get("answer")
    return AgentResult(rewards, None if answer is None else str(answer))


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return file.read().decode(errors="replace")
