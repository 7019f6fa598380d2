"""Where this machine keeps what is made once."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Models and environments of our own: NEMO_RL_CACHE, else ~/.cache/nemo_rl."""
    return Path(os.environ.get("NEMO_RL_CACHE", Path.home() / ".cache" / "nemo_rl"))
