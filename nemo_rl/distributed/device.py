"""The device that a key of the configuration means in this process."""

import torch

from nemo_rl.errors import ConfigError


def resolve_device(name: str, key: str = "policy.device") -> torch.device:
    """auto is CUDA where there is one; the first device that the process sees. Raises ConfigError under `key`."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(key, name, "this machine has no CUDA device; allowed: cpu, auto")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")
