"""Reinforcement learning and on-policy distillation for language models."""

import importlib
from typing import Any

__version__ = "0.1.0"
API = ("EvaluationResult", "Trainer", "TrainingResult", "evaluate", "load_config", "train")  # their types: __init__.pyi


def __getattr__(name: str) -> Any:
    """Import the Python interface on first use: `import nemo_rl` alone loads nothing."""
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module("nemo_rl.api"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *API))
