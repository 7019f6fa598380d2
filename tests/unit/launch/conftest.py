"""A directory with a tiny model, a dataset beside it, and a recipe that trains the one on the other."""

import gc
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_rl.config.loading import load_config, load_distillation_config
from nemo_rl.config.master import DistillationRunConfig, GRPORunConfig, TrainingRunConfig
from nemo_rl.launch import training as session
from nemo_rl.launch.placement_plan import placement_plan
from nemo_rl.launch.resolved_run import find_layout
from nemo_rl.quickstart.models import make_tokenizer

MAX_LENGTH = 32  # tokens of a rollout; a question of one letter takes 17 with the template around it
Recipe = Callable[..., GRPORunConfig]
DistillationRecipe = Callable[..., DistillationRunConfig]


def plan_of(config: TrainingRunConfig) -> str:
    return placement_plan(config, find_layout(config))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def teacher_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same kind, large enough that its distributions are far from uniform."""
    return save_model(tmp_path_factory.mktemp("teacher"), seed=1, initializer_range=0.5)


def save_model(directory: Path, *, seed: int, **weights: Any) -> Path:
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ends, **weights)).save_pretrained(
        directory
    )
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A dataset of six letters, each its own answer."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"input": letter, "output": letter}) + "\n" for letter in "abcdef"))
    return path


@pytest.fixture
def recipe(tmp_path: Path, model_directory: Path, letters: Path) -> Recipe:
    """`recipe(*overrides)`: two questions a step, three answers each, scored by `tests.unit.launch.scoring`."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 3, max_num_steps: 1, val_period: 0, val_at_end: false}}
policy:
  model_name: {model_directory}
  precision: float32
  device: cpu
  train_global_batch_size: 6
  train_micro_batch_size: 6
  max_total_sequence_length: {MAX_LENGTH}
  generation: {{backend: hf, max_new_tokens: 4}}
data: {{train: {{dataset_name: jsonl, data_path: {letters}, env_name: letters}}}}
env: {{letters: {{type: "tests.unit.launch.scoring:length"}}}}
logger: {{log_dir: {tmp_path / "runs"}, progress: false}}
"""
    )
    return lambda *overrides: load_config(path, overrides)


@pytest.fixture
def distillation_recipe(recipe: Recipe, tmp_path: Path, teacher_directory: Path) -> DistillationRecipe:
    """The same with a teacher in place of rewards: six questions a step, one answer each, scored by `Counting`."""
    text = (tmp_path / "recipe.yaml").read_text()
    text = re.sub(
        r"grpo: .*",
        "distillation: {num_prompts_per_step: 6, max_num_steps: 1, topk_logits_k: 5, "
        "val_period: 0, val_at_end: false}\n"
        f"teacher: {{model_name: {teacher_directory}, precision: float32}}",
        text,
    )
    path = tmp_path / "distillation.yaml"
    path.write_text(text.replace("scoring:length", "scoring:Counting"))
    return lambda *overrides: load_distillation_config(path, overrides)


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What opening a run changes in the process stays as it was."""
    monkeypatch.setattr(session, "open_console", lambda level: Console(file=io.StringIO()))
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
