"""The recipes for GPUs and the memory that they plan for, without a GPU, a download or a dataset."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nemo_rl.config.layout import Layout
from nemo_rl.config.layout_planner import make_layout, make_policy_layout
from nemo_rl.config.loading import load_config, load_distillation_config, load_sft_config
from nemo_rl.config.supervised_runs import SupervisedRunConfig
from nemo_rl.launch.memory_plan import GB, RunMemory, make_run_memory
from tests.fakes.model_configs import MODEL_CONFIGS

ROOT = Path(__file__).parents[3]
SAMPLING = ("collect", "eval")  # beginnings of recipes that train nothing
LOADERS: dict[str, Callable[..., Any]] = {"distillation": load_distillation_config, "sft": load_sft_config}


def load_recipe(recipe: str, *overrides: str) -> Any:
    loader = next((each for start, each in LOADERS.items() if Path(recipe).name.startswith(start)), load_config)
    return loader(ROOT / recipe, overrides)


def _is_for_gpus(path: Path) -> bool:
    if path.name.startswith(SAMPLING):
        return False
    text = path.read_text()
    base = next((line.split()[1] for line in text.splitlines() if line.startswith("defaults: ")), None)
    return "model_name: Qwen/" in text or (base is not None and _is_for_gpus(path.parent / base))


CUDA_RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.yaml") if _is_for_gpus(path))


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put config.json of the recipes' models into what looks like the hub's cache, and make NeMo Gym's files."""

    def path_of(name: str, file: str) -> str | None:
        if name not in MODEL_CONFIGS:
            return None
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(MODEL_CONFIGS[name]))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", path_of)
    for name in ("math", "workplace_assistant", "mix"):
        for part in ("train", "validation"):
            (tmp_path / f"{name}_{part}.jsonl").touch()
    monkeypatch.setenv("NEMO_GYM_DATA", str(tmp_path))


@cache
def recipe_and_layout(recipe: str, *overrides: str) -> tuple[Any, Layout]:
    config = load_recipe(recipe, *overrides)
    if isinstance(config, SupervisedRunConfig):
        return config, make_policy_layout(config.policy, config.cluster, "cuda")
    return config, make_layout(config, "cuda")


def run_memory(recipe: str, gigabytes: int, *overrides: str) -> RunMemory:
    return make_run_memory(*recipe_and_layout(recipe, *overrides), gigabytes * GB)
