"""NeMo Gym from the configuration: its stacks reached or started, and what the rollouts of each need."""

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from nemo_rl.build.agents import MODEL_NAME
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.nemo_gym import NemoGymConfig
from nemo_rl.data.blend import Blend
from nemo_rl.data.datasets import PromptSet
from nemo_rl.environments.nemo_gym.client import GymClient
from nemo_rl.environments.nemo_gym.stack import GymStack
from nemo_rl.experience.nemo_gym_rollouts import GymRuntime
from nemo_rl.gateway.manager import GatewayManager


def gym_configs(config: RolloutRunConfig) -> dict[str, NemoGymConfig]:
    return {name: section for name, section in config.env.items() if isinstance(section, NemoGymConfig)}


async def open_nemo_gym(
    config: RolloutRunConfig,
    prompt_sets: Sequence[PromptSet],
    manager: GatewayManager,
    run_dir: Path,
    stack: AsyncExitStack,
) -> dict[str, GymRuntime]:
    """Each stack with all agents that rows of `prompt_sets` name, closed with `stack`.

    Raises ConfigError for an agent that a stack does not have, GymUnavailable for what does not answer in time.
    """
    sections = gym_configs(config)
    runtimes = {}
    for name, section in sections.items():
        directory = run_dir if len(sections) == 1 else run_dir / name
        client = await _open_client(name, section, agent_names_for(name, prompt_sets), manager, directory, stack)
        runtimes[name] = GymRuntime(
            client,
            manager,
            max_concurrency=section.max_concurrency,
            trajectory_selection=config.rollout.trajectory_selection,
        )
    return runtimes


def agent_names_for(name: str, prompt_sets: Iterable[PromptSet]) -> frozenset[str]:
    """The agents that rows of an entry of `env` name."""
    found: set[str] = set()
    for prompts in (prompt_set.prompts for prompt_set in prompt_sets):
        if isinstance(prompts, Blend):
            found.update(*(part.agent_names for part in prompts.parts if name in part.task_names))
        else:
            found.update(prompt.agent_name for prompt in prompts if prompt.task_name == name)
    return frozenset(found)


async def _open_client(
    name: str,
    section: NemoGymConfig,
    agents: frozenset[str],
    manager: GatewayManager,
    directory: Path,
    stack: AsyncExitStack,
) -> GymClient:
    key, started = f"env.{name}", None
    if section.config_paths is not None:
        started = await GymStack.start(
            section,
            policy_base_url=manager.default_base_url,
            policy_api_key=manager.api_key,
            policy_model_name=MODEL_NAME,
            run_dir=directory,
            key=key,
        )
        stack.push_async_callback(started.close)
    client = GymClient(section, head_url=started.head_url if started else None, key=key)
    stack.push_async_callback(client.close)
    await client.connect(agents, check=started.check if started else None)
    return client
