"""Ten recipes in NeMo-RL's terms train two steps with a tiny model, and equal the same runs in this project's terms.

Those of main are compared with recipes written by hand, the others with their translations.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config import loading
from nemo_rl.launch.supervised import run_supervised
from nemo_rl.launch.training import run_training
from tests.functional.cli import ROOT

pytestmark = pytest.mark.timeout(900)
DIRECTORY = ROOT / "tests" / "compat" / "recipes"
OWN = ROOT / "tests" / "compat" / "own"  # those of main in this project's terms, written by hand
RECIPES = [
    *(f"main/{name}" for name in ("grpo", "gspo", "async", "grpo_context_parallel", "distillation", "sft")),
    "0.7/grpo",
    "0.6/gspo",
    "0.6/sft",
    "0.5/grpo",
]
LOADERS: dict[str, Any] = {"distillation": loading.load_distillation_config, "sft": loading.load_sft_config}


def letters(messages: list[dict[str, str]], metadata: dict[str, Any]) -> float:
    """The share of letters in the response."""
    text = messages[-1]["content"]
    return sum(character.isalpha() for character in text) / max(len(text), 1)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    words = [f"{first}{second}t" for first in "abcdefgh" for second in "aeiou"]
    chat = [[{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}] for word in words]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in chat))
    return path


def overrides(family: str, model: Path, rows: Path) -> list[str]:
    """Return what makes a recipe small: the model, the data, the sizes and a CPU."""
    shared = [
        f"policy.model_name={model}",
        "~policy.tokenizer",
        "++policy.device=cpu",
        "policy.precision=float32",
        "policy.max_total_sequence_length=48",
        "++policy.dtensor_cfg.tensor_parallel_size=1",
        f"data={{train: {{dataset_name: jsonl, data_path: '{rows}'}}, validation: null}}",
        "checkpointing.enabled=false",
        "++logger.wandb_enabled=false",
        "++logger.tensorboard_enabled=false",
        "++cluster.gpus_per_node=1",
        "++cluster.num_nodes=1",
        "policy.train_global_batch_size=8",
        "policy.train_micro_batch_size=4",
        f"{family}.max_num_steps=2",
        f"{family}.val_period=0",
        f"++{family}.val_at_start=false",
    ]
    if family == "sft":
        return shared
    sampled = [
        "policy.generation.backend=hf",
        "policy.generation.max_new_tokens=8",
        "~policy.generation.vllm_cfg",
        f"{family}.num_prompts_per_step=4",
        f"{family}.num_generations_per_prompt=2",
        f"env={{letters: {{type: '{__name__}:letters'}}}}",
        "data.default={env_name: letters}",
    ]
    teacher = [f"teacher.model_name={model}", f"++teacher.tokenizer.name={model}"]
    return [*shared, *sampled, *(teacher if family == "distillation" else [])]


def train(path: Path, family: str, arguments: list[str]) -> dict[int, dict[str, float]]:
    """Return the metrics of each step that do not depend on the time."""
    config = LOADERS.get(family, loading.load_config)(path, arguments)
    asyncio.run((run_supervised if family == "sft" else run_training)(config, "a test"))
    (metrics,) = Path(config.logger.log_dir).glob("exp_*/metrics.jsonl")
    steps: dict[int, dict[str, float]] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        step = steps.setdefault(row.pop("step"), {})
        step |= {
            name: value for name, value in row.items() if name in ("train/loss", "train/grad_norm", "train/reward")
        }
    return {step: values for step, values in steps.items() if values}


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_equal_those_of_the_recipe_in_our_terms(name: str, fresh: Path, rows: Path, tmp_path: Path) -> None:
    path = DIRECTORY / f"{name}.yaml"
    stem = path.stem
    family = stem if stem in ("sft", "distillation") else "grpo"
    arguments = overrides(family, fresh, rows)
    theirs = train(path, family, [*arguments, f"logger.log_dir={tmp_path / 'theirs'}"])
    by_hand, ours = OWN / path.name, f"++logger.log_dir={tmp_path / 'ours'}"
    assert sorted(theirs) == [1, 2]
    if path.parent.name == "main":
        assert train(by_hand, family, [*arguments, ours]) == theirs
        return
    translated = tmp_path / "own.yaml"
    translated.write_text(loading.format_translation(path, [*arguments, ours]))
    assert train(translated, family, []) == theirs
