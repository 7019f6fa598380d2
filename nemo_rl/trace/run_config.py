"""Values of a run's configuration that readers of its trace use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

CONFIG_FILE = "config.yaml"  # in a run's directory
DEFAULT_MAX_NUM_SEQS = 256  # an engine without `max_num_seqs` has it on a CPU

Config: TypeAlias = Mapping[str, Any]


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return the run's configuration; empty if it is gone."""
    try:
        config = yaml.safe_load((run_dir / CONFIG_FILE).read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def algorithm_key(config: Config) -> str:
    """Return the key of the algorithm's section."""
    return "distillation" if "distillation" in config else "grpo"


def background_key(config: Config) -> str:
    """Return the key of the section of rollouts in the background."""
    return "distillation.async_rollouts" if "distillation" in config else "grpo.async_grpo"


def lookup(config: Config, key: str) -> Any:
    """Return a value of the run's configuration by its dotted key; None if it is not there."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
