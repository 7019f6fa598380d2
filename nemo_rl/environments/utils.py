"""NeMo-RL's import path of its helper and its registry of environments."""

from nemo_rl.compat.environment_interface import chunk_list_to_workers
from nemo_rl.compat.python_names import refuse

__all__ = ["chunk_list_to_workers"]
__getattr__ = refuse(__name__)
