"""Datasets as prompts, and conversations as tokens."""

from nemo_rl.config.kinds import foreign_names

__getattr__ = foreign_names(__name__)
