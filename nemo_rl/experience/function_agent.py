"""Agents that are a function, in this process or each run in a Ray task."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl.config.kinds import import_path
from nemo_rl.environments.blocking_calls import BlockingCalls
from nemo_rl.environments.boundary import is_async_callable
from nemo_rl.environments.states import copy_state
from nemo_rl.environments.user_code import contain_exit, name_user_code
from nemo_rl.types import AgentResult, Prompt

if TYPE_CHECKING:
    pass  # loads Ray


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
        self._user_code = name_user_code(function)
        self._blocking_calls = BlockingCalls(f"agent-{name}", max_threads, user_code=self._user_code)

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        own = replace(prompt, env_state=copy_state(dict(prompt.env_state)))
        call = partial(self._function, own, base_url, api_key)
        returned = await (contain_exit(call(), self._user_code) if self._is_async else self._blocking_calls.run(call))
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
    """Return the return value of an agent's function as an AgentResult; rewards are checked later."""
    if isinstance(returned, AgentResult):
        return returned
    if returned is None:
        return AgentResult()
    if isinstance(returned, Mapping):
        return AgentResult({str(key): value for key, value in returned.items()})
    return AgentResult({name: returned})
