"""Agents: who owns its own loop and talks to the gateway. A function, here or in a process of its own.

A command line is one too: agent_process.py. How their runs become trajectories: agent_rollouts.py.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nemo_rl.environments.blocking import BlockingCalls, is_async
from nemo_rl.environments.registry import import_path
from nemo_rl.interfaces import Agent
from nemo_rl.types import AgentResult, Prompt, SamplingParams

if TYPE_CHECKING:
    from nemo_rl.gateway.manager import FinishedSession, SessionHandle  # loads Ray


class Sessions(Protocol):
    """What agents' rollouts need of the gateway; `gateway.manager.GatewayManager` has it."""

    def open_session(
        self, *, seed: int, sampling: SamplingParams | None = None, server: int | None = None
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
    sessions: Sessions
    timeout_s: float  # of one run
    max_concurrency: int  # runs at once
    scored_by: str | None = None  # the environment that rewards runs without a reward
    trajectory_selection: Literal["all", "longest"] = "all"  # which histories are trained on


class AgentExit(Exception):
    """An agent tried to end the process that it runs in."""


class FunctionAgent:
    """A function `(prompt, base_url, api_key)`; its reward may be a number, numbers by name, an AgentResult or None.

    A number becomes the reward `{name: number}`; None: the reward is posted to the gateway, or scored later. A function
    that is not async runs in a thread of its own, which nobody can stop: past its deadline it is left behind, and its
    session is closed. The prompt is a copy that it may change.
    """

    def __init__(self, name: str, function: Callable[[Prompt, str, str], Any], *, max_threads: int = 64) -> None:
        self._name = name
        self._function = function
        self._is_async = is_async(function)
        self._blocking_calls = BlockingCalls(f"agent-{name}", max_threads)

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        own = replace(prompt, env_state=copy.deepcopy(dict(prompt.env_state)))
        call = partial(self._function, own, base_url, api_key)
        try:
            returned = await call() if self._is_async else await self._blocking_calls.run(partial(_contained, call))
        except SystemExit as error:  # would end the event loop, and the run with it
            raise AgentExit(f"the agent called exit({error.code})") from error
        return agent_result(self._name, returned)


class TaskAgent:
    """A function by dotted path, each run in a process of its own: its crash, memory and locks are its own."""

    def __init__(self, name: str, path: str) -> None:
        from nemo_rl.distributed.cluster import connect  # loads Ray

        connect()  # takes seconds that no rollout should wait
        self._name = name
        self._path = path

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        from nemo_rl.distributed.actors import spawn_actor

        process = spawn_actor(HostedFunction, self._name, self._path)
        try:
            return await process.call("run", prompt, base_url, api_key)
        finally:
            process.kill()


class HostedFunction:
    """The function inside its process."""

    def __init__(self, name: str, path: str) -> None:
        self._agent = FunctionAgent(name, import_path(f"env.{name}.function", path))

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        return await self._agent.run(prompt, base_url, api_key)


def agent_result(name: str, returned: Any) -> AgentResult:
    """What an agent's function returned, as a result; whether rewards are numbers is looked at later."""
    if isinstance(returned, AgentResult):
        return returned
    if returned is None:
        return AgentResult()
    if isinstance(returned, Mapping):
        return AgentResult({str(key): value for key, value in returned.items()})
    return AgentResult({name: returned})


def _contained(call: Callable[[], Any]) -> Any:
    """The call in its thread, where only exceptions may leave it."""
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        raise AgentExit(f"the agent raised {type(error).__name__}({error})") from error
