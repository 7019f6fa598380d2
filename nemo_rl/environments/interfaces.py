"""NeMo-RL's import path of its interface of environments."""

from nemo_rl.config.kinds import foreign_names

__getattr__ = foreign_names(__name__)
