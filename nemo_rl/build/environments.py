"""The environments of `env` that rollouts call themselves; agents and NeMo Gym: agents.py, nemo_gym.py."""

from contextlib import AsyncExitStack

from nemo_rl.config.env import AgentConfig
from nemo_rl.config.master import RolloutRunConfig
from nemo_rl.config.nemo_gym import NemoGymConfig
from nemo_rl.environments.registry import make_environment
from nemo_rl.interfaces import Environment


def open_environments(config: RolloutRunConfig, stack: AsyncExitStack) -> dict[str, Environment]:
    """By task name, closed with `stack`; raises ConfigError for one that cannot be found or made."""
    environments: dict[str, Environment] = {}
    for name, section in config.env.items():
        if not isinstance(section, AgentConfig | NemoGymConfig):
            environments[name] = make_environment(name, section)
            stack.push_async_callback(environments[name].close)
    return environments
