"""A recipe that is as small as the schema allows, and a way to load it."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from nemo_rl.config.loading import load_config
from nemo_rl.config.master import GRPORunConfig

SMALLEST = """
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2}
policy: {model_name: m, train_global_batch_size: 8, train_micro_batch_size: 4}
data: {train: {dataset_name: gsm8k}}
env: {math: {}}
"""

Load = Callable[..., GRPORunConfig]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A directory's base.yaml, the smallest recipe; other recipes are written beside it."""
    path = tmp_path / "base.yaml"
    path.write_text(SMALLEST)
    return path


@pytest.fixture
def load(recipe: Path) -> Load:
    """`load(text, *overrides)`: a recipe of that text over the smallest one."""

    def write_and_load(text: str = "", *overrides: str) -> GRPORunConfig:
        path = recipe.parent / "recipe.yaml"
        path.write_text("defaults: base.yaml\n" + dedent(text))
        return load_config(path, overrides)

    return write_and_load
