"""Environment and dataset `verifiers`: an environment of the package verifiers (0.4 and later) owns the whole rollout.

Its harness runs as verifiers runs it, its model calls go to the gateway, and its rewards are the rollout's. The dataset
reads the prompts from the same taskset.
"""

import asyncio
import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

from pydantic import Field

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.config.entry_checks import check_agent_runner, require_package
from nemo_rl.config.environment import AgentRunnerConfig
from nemo_rl.config.kinds import Entry
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.value_types import Seconds
from nemo_rl.data.rows import Row
from nemo_rl.environments.ecosystem.chat_client import MODEL
from nemo_rl.errors import ConfigError
from nemo_rl.types import AgentResult, Prompt

# verifiers reads API keys only from environment variables, and hides variables of this name from programs it starts.
KEY_VARIABLE = "NEMO_RL_GATEWAY_API_KEY"


class VerifiersConfig(AgentRunnerConfig):
    """An environment of verifiers, configured by its own section `env`, as on its command line.

    Example: `environment: {taskset: {id: gsm8k-v1}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}`
    """

    environment: dict[str, Any] = Field(default_factory=dict)  # verifiers' section `env`, which names the taskset
    timeout_s: Seconds = 480.0  # per rollout


class VerifiersError(Exception):
    """An episode that verifiers could not complete."""


def check_verifiers(key: str, section: VerifiersConfig, config: RolloutRunConfig) -> None:
    """Raise ConfigError if verifiers refuses the section or the package is not installed."""
    require_package(f"{key}.type", "verifiers", "verifiers", "verifiers")
    from verifiers.v1.utils.loaders import resolve_env_config  # pyright: ignore[reportMissingImports]

    taskset = section.environment.get("taskset")
    if not isinstance(taskset, Mapping) or not taskset.get("id"):
        raise ConfigError(f"{key}.environment", section.environment, "must name a taskset: {taskset: {id: ...}}")
    try:
        resolve_env_config(copy.deepcopy(section.environment))
    except Exception as error:  # raised by a plug-in's module or by pydantic
        raise ConfigError(f"{key}.environment", section.environment, f"verifiers refuses it: {error}") from error
    check_agent_runner(key, section, config)


class VerifiersAgent:
    """Runs one episode per rollout, in its own environment object, whose clients and servers end with the episode."""

    def __init__(self, name: str, section: VerifiersConfig) -> None:
        self._name = name
        self._environment = section.environment
        self._tasks: dict[int, Any] = {}  # by index in the taskset
        self._reading = asyncio.Lock()

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]

        environment = load_environment(resolve_env_config(copy.deepcopy(self._environment)))
        task = await self._find_task(environment.taskset, prompt)
        variable = f"{KEY_VARIABLE}_{uuid4().hex}"  # unique to this rollout
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
            raise VerifiersError(f"task {index} differs from the dataset's: both must name the same taskset")
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


def check_taskset(key: str, section: DatasetConfig, config: Any) -> None:
    """Raise ConfigError unless the dataset names its taskset."""
    if section.task is None:
        raise ConfigError(f"{key}.task", None, "required by dataset_name: verifiers, the id of its taskset")


def read_taskset(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield one row per task, endlessly for an endless taskset: its messages, its index and its key.

    `task` is the id of the taskset, `task_kwargs` holds the other keys of its section.
    """
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type  # pyright: ignore[reportMissingImports]

    try:
        kind = taskset_config_type(section.task or "")
        taskset = load_taskset(kind.model_validate({**section.task_kwargs, "id": section.task}))
    except Exception as error:  # raised by a plug-in's module or by pydantic
        raise ConfigError("task", section.task, f"verifiers refuses it: {error}") from error
    if section.size is None and not taskset.bounded:
        raise ConfigError("size", None, "required: the taskset is endless")
    for task in taskset:
        data = task.data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages.append({"role": "user", "content": data.prompt_text or data.name or task.key})
        yield {"messages": messages, "task_index": data.idx, "task_key": task.key}


VERIFIERS_DATASET = DatasetEntry(DatasetConfig, make=read_taskset, check=check_taskset, env_name="verifiers")
VERIFIERS = Entry(VerifiersConfig, make=VerifiersAgent, check=check_verifiers)
