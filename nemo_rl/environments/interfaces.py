"""NeMo-RL's import path of its interface of environments."""

from nemo_rl.compat.environment_interface import EnvironmentInterface, EnvironmentReturn

__all__ = ["EnvironmentInterface", "EnvironmentReturn"]
