"""NeMo-RL's import path of its interpreters and its cluster."""

from nemo_rl.compat.environment_interface import PY_EXECUTABLES
from nemo_rl.compat.python_names import refuse

__all__ = ["PY_EXECUTABLES"]
__getattr__ = refuse(__name__)
