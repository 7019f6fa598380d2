"""The environment `verifiers`: an environment of the package verifiers (0.4 and later), which owns the whole rollout.

Its harness runs as verifiers runs it, its model calls go to the gateway, and its rewards are the rollout's. The prompts
come from the dataset `verifiers` (data/sources.py), which reads the same taskset.
"""

import asyncio
import copy
import os
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from pydantic import Field

from nemo_rl.config.entry_checks import check_agent_runner, require_package
from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.environments.chat_client import MODEL
from nemo_rl.errors import ConfigError
from nemo_rl.types import AgentResult, Prompt

# verifiers reads keys from environment variables alone, and keeps those of this name from the programs that it starts.
KEY_VARIABLE = "NEMO_RL_GATEWAY_API_KEY"


class VerifiersConfig(AgentRunnerConfig):
    """An environment of verifiers: its own section `env`, as its command line takes it.

    Example: `environment: {taskset: {id: gsm8k-v1}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}`
    """

    environment: dict[str, Any] = Field(default_factory=dict)  # the section `env` of verifiers, which names its taskset
    timeout_s: float = Field(default=480.0, gt=0)  # per rollout


class VerifiersError(Exception):
    """An episode that verifiers could not complete."""


def check_verifiers(key: str, section: VerifiersConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError for a section that verifiers refuses, and where the package is not installed."""
    require_package(f"{key}.type", "verifiers", "verifiers", "verifiers")
    from verifiers.v1.utils.loaders import resolve_env_config  # pyright: ignore[reportMissingImports]

    taskset = section.environment.get("taskset")
    if not isinstance(taskset, Mapping) or not taskset.get("id"):
        raise ConfigError(f"{key}.environment", section.environment, "must name a taskset: {taskset: {id: ...}}")
    try:
        resolve_env_config(copy.deepcopy(section.environment))
    except Exception as error:  # a plug-in's module, or pydantic's
        raise ConfigError(f"{key}.environment", section.environment, f"verifiers refuses it: {error}") from error
    check_agent_runner(key, section, config)


class VerifiersAgent:
    """One episode a rollout, in an environment object of its own, whose clients and servers end with it."""

    def __init__(self, name: str, section: VerifiersConfig) -> None:
        self._name = name
        self._environment = section.environment
        self._tasks: dict[int, Any] = {}  # by their place in the taskset
        self._reading = asyncio.Lock()

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]

        environment = load_environment(resolve_env_config(copy.deepcopy(self._environment)))
        task = await self._find_task(environment.taskset, prompt)
        variable = f"{KEY_VARIABLE}_{uuid4().hex}"  # of this rollout
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        os.environ[variable] = api_key
        try:
            async with environment.serving():
                episode = await environment.run_episode(task, vf.ModelContext(MODEL, client))
        finally:
            del os.environ[variable]
        return self._result(episode)

    async def _find_task(self, taskset: Any, prompt: Prompt) -> Any:
        """Return the task that the prompt's row was made from; the taskset is read once, off the event loop."""
        index = prompt.env_state.get("task_index")
        if index is None:
            raise VerifiersError("the prompt has no task_index: its dataset must be dataset_name: verifiers")
        async with self._reading:
            if index not in self._tasks:
                self._tasks |= await asyncio.to_thread(_read_until, taskset, index)
        task = self._tasks.get(index)
        if task is None or task.key != prompt.env_state["task_key"]:
            raise VerifiersError(f"task {index} is another one than the dataset's: its taskset must be the same")
        return task

    def _result(self, episode: Any) -> AgentResult:
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        if not episode.ok:
            errors = [error for part in (episode, *episode.traces) for error in part.errors]
            raise VerifiersError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not completed")
        rewards: dict[str, float] = {}
        for trace in traces:
            for name, reward in trace.rewards.items():
                if reward is not None:
                    rewards[name] = rewards.get(name, 0.0) + reward.value
        return AgentResult(rewards, traces[-1].last_reply if traces else None)


def _read_until(taskset: Iterable[Any], index: int) -> dict[int, Any]:
    tasks = {}
    for task in taskset:
        tasks[task.data.idx] = task
        if task.data.idx == index:
            break
    return tasks


VERIFIERS = Entry(VerifiersConfig, make=VerifiersAgent, check=check_verifiers)
