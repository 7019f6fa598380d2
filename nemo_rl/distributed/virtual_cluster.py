"""The interpreters that NeMo-RL's Ray classes name in `runtime_env`: here one environment serves all of them."""

import sys

from nemo_rl import nemo_rl_names


class PY_EXECUTABLES:
    """The running interpreter, under every name."""

    SYSTEM = BASE = VLLM = FSDP = AUTOMODEL = MCORE = NEMO_GYM = sys.executable


__getattr__ = nemo_rl_names.refuse(__name__)
