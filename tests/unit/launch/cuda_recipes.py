"""The recipes for GPUs and the memory that they plan for, without a GPU, a download or a dataset."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nemo_rl.config.layout import make_layout, make_policy_layout
from nemo_rl.config.loading import load_config, load_distillation_config, load_sft_config
from nemo_rl.config.supervised import SupervisedRunConfig
from nemo_rl.launch.memory_plan import GB, RunMemory
from nemo_rl.launch.memory_report import make_run_memory
from tests.fakes.model_configs import MODEL_CONFIGS

ROOT = Path(__file__).parents[3]
CUDA_RECIPES = {
    "nemo_rl/recipes/grpo_math_1B.yaml": load_config,
    "nemo_rl/recipes/distillation_math.yaml": load_distillation_config,
    "nemo_rl/recipes/sft.yaml": load_sft_config,
    "examples/nemo_gym/grpo_math.yaml": load_config,
    "examples/nemo_gym/grpo_workplace_assistant.yaml": load_config,
}


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put config.json of the recipes' models into what looks like the hub's cache."""

    def path_of(name: str, file: str) -> str | None:
        if name not in MODEL_CONFIGS:
            return None
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(MODEL_CONFIGS[name]))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", path_of)


def run_memory(recipe: str, gigabytes: int) -> RunMemory:
    files = [f"data.{name}.data_path={__file__}" for name in ("train", "validation") if "nemo_gym" in recipe]
    config: Any = CUDA_RECIPES[recipe](ROOT / recipe, files)  # of their data only the existence is checked
    if isinstance(config, SupervisedRunConfig):
        layout = make_policy_layout(config.policy, config.cluster, "cuda")
    else:
        layout = make_layout(config, "cuda")
    return make_run_memory(config, layout, gigabytes * GB)
