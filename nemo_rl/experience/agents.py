"""Agents, which own their loop and talk to the gateway: a function, here or in a Ray task, or a command line.

How their runs become trajectories: agent_rollouts.py.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from nemo_rl.config.entry_checks import check_agent_runner, reject_wrappers
from nemo_rl.config.environment import AgentRunnerConfig, RolloutRunnerConfig
from nemo_rl.config.kinds import Entry, import_path
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.data.messages import to_openai_message
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import contain_exit, is_async_callable
from nemo_rl.errors import ConfigError
from nemo_rl.experience.turns import copy_state
from nemo_rl.interfaces import Agent
from nemo_rl.types import AgentResult, Prompt, SamplingParams

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray


class AgentConfig(AgentRunnerConfig):
    """An agent that owns its loop: exactly one of `function` and `command`.

    Its reward is what it returns or posts, or what the environment `scored_by` gives to its last conversation.
    """

    function: str | None = None  # a dotted path: (prompt, base_url, api_key) -> reward, rewards by name, or AgentResult
    command: list[str] | None = None  # run with OPENAI_BASE_URL, OPENAI_API_KEY and the prompt as JSON on its stdin
    in_tasks: bool = False  # function: each run in a Ray task, a process of its own


def check_agent(key: str, section: AgentConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for an agent that cannot run or be scored."""
    if (section.function is None) == (section.command is None):
        both = {"function": section.function, "command": section.command}
        raise ConfigError(key, both, "an agent has either a function or a command")
    if section.command is not None and not section.command:
        raise ConfigError(f"{key}.command", [], "must name a program")
    if section.in_tasks and section.function is None:
        raise ConfigError(f"{key}.in_tasks", True, "a command has a process of its own already; allowed: false")
    reject_wrappers(key, section, "agents run one prompt each; allowed: false (see in_tasks)")
    check_agent_runner(key, section, config)


def make_agent(name: str, section: AgentConfig) -> Agent:
    """Return the agent of the entry `env.<name>`; raises ConfigError for a function that cannot be imported."""
    if section.command is not None:
        return CommandAgent(name, section.command)
    assert section.function is not None  # check_agent
    key = f"env.{name}.function"
    function = import_path(key, section.function)
    if not callable(function):
        raise ConfigError(key, section.function, "not a function")
    if section.in_tasks:
        return IsolatedFunctionAgent(name, section.function)
    return FunctionAgent(name, function, max_threads=section.max_concurrency)


AGENT = Entry(AgentConfig, make=make_agent, check=check_agent)


class SessionProvider(Protocol):
    """The part of the gateway that agents' rollouts need; `gateway.manager.GatewayManager` implements it."""

    def open_session(
        self,
        *,
        seed: int,
        sampling: SamplingParams | None = None,
        server: int | None = None,
        trains: bool = True,
    ) -> "SessionHandle": ...

    async def finish(self, handle: "SessionHandle") -> "FinishedSession":
        """Close the session and hand out what it holds."""
        ...

    async def abandon(self, handle: "SessionHandle") -> None:
        """Close the session and forget what it holds; nothing where it has ended already."""
        ...


@dataclass(frozen=True, slots=True)
class AgentRuntime:
    """An agent with what its runs need."""

    agent: Agent
    sessions: SessionProvider
    timeout_s: float  # of one run
    max_concurrency: int  # runs at once
    scored_by: str | None = None  # the environment that rewards runs without a reward
    trajectory_selection: Literal["all", "longest"] = "all"  # which histories are trained on


def make_agent_runtime(
    agent: Agent,
    section: RolloutRunnerConfig,
    sessions: SessionProvider,
    trajectory_selection: Literal["all", "longest"],
) -> AgentRuntime:
    """Return an agent made of `section` with the gateway's sessions and its limits."""
    assert isinstance(section, AgentRunnerConfig)
    return AgentRuntime(
        agent,
        sessions,
        timeout_s=section.timeout_s,
        max_concurrency=section.max_concurrency,
        scored_by=section.scored_by,
        trajectory_selection=trajectory_selection,
    )


class FunctionAgent:
    """A function `(prompt, base_url, api_key)`; its reward may be a number, numbers by name, an AgentResult or None.

    A number becomes the reward `{name: number}`; None: the reward is posted to the gateway, or scored later. A function
    that is not async runs in a thread, which cannot be stopped: past its deadline it is abandoned, and its session is
    closed. The prompt is a copy that it may change.
    """

    def __init__(self, name: str, function: Callable[[Prompt, str, str], Any], *, max_threads: int = 64) -> None:
        self._name = name
        self._function = function
        self._is_async = is_async_callable(function)
        self._blocking_calls = BlockingCalls(f"agent-{name}", max_threads)

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        own = replace(prompt, env_state=copy_state(dict(prompt.env_state)))
        call = partial(self._function, own, base_url, api_key)
        returned = await (contain_exit(call()) if self._is_async else self._blocking_calls.run(call))
        return to_agent_result(self._name, returned)


class IsolatedFunctionAgent:
    """A function by dotted path, each run in a process of its own: its crash, memory and locks are its own."""

    def __init__(self, name: str, path: str) -> None:
        from nemo_rl.distributed.cluster import connect  # loads Ray

        connect()  # takes seconds that no rollout should wait
        self._name = name
        self._path = path

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        from nemo_rl.distributed.actors import spawn_actor

        process = spawn_actor(FunctionAgentActor, self._name, self._path)
        try:
            return await process.call("run", prompt, base_url, api_key)
        finally:
            process.kill()


class FunctionAgentActor:
    """The function inside its process."""

    def __init__(self, name: str, path: str) -> None:
        self._agent = FunctionAgent(name, import_path(f"env.{name}.function", path))

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        return await self._agent.run(prompt, base_url, api_key)


def to_agent_result(name: str, returned: Any) -> AgentResult:
    """Convert what an agent's function returned; whether rewards are numbers is checked later."""
    if isinstance(returned, AgentResult):
        return returned
    if returned is None:
        return AgentResult()
    if isinstance(returned, Mapping):
        return AgentResult({str(key): value for key, value in returned.items()})
    return AgentResult({name: returned})


TAIL_BYTES = 64 * 1024  # of a program's output: as much as is looked at


class CommandError(Exception):
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
            stdin.write(json.dumps(prompt_to_dict(prompt), default=str).encode())
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
                reported = _read_tail(stderr).strip()
                last_line = reported.splitlines()[-1] if reported else "nothing on standard error"
                raise CommandError(f"exit status {status}: {last_line}\n{reported}")
            return parse_agent_output(self._name, _read_tail(stdout))


def prompt_to_dict(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt to what a program reads."""
    return {
        "prompt_id": prompt.prompt_id,
        "messages": [to_openai_message(message) for message in prompt.messages],
        "env_state": dict(prompt.env_state),
        "tools": [dict(tool) for tool in prompt.tools],
    }


def parse_agent_output(name: str, output: str) -> AgentResult:
    """Parse the reward in the last line, if there is one: programs may write anything else."""
    lines = output.strip().splitlines()
    try:
        reported = json.loads(lines[-1]) if lines else None
    except ValueError:
        reported = None
    if not isinstance(reported, dict):
        return AgentResult()
    rewards = reported.get("rewards")
    if not isinstance(rewards, dict):
        rewards = {name: reported["reward"]} if "reward" in reported else {}
    answer = reported.get("answer")
    return AgentResult(rewards, None if answer is None else str(answer))


def _read_tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return file.read().decode(errors="replace")
