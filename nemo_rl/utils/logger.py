"""NeMo-RL's import path of the run directory, for run scripts."""

from nemo_rl.config.kinds import foreign_names

__getattr__ = foreign_names(__name__)
