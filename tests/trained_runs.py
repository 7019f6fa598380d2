"""Run directories with checkpoints of the quickstart's model, as runs of the quickstart write them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from nemo_rl.checkpoint import CheckpointStore, TrainingInfo
from nemo_rl.config.loading import load_config, resolved_yaml
from nemo_rl.config.shared_sections import CheckpointingConfig
from nemo_rl.quickstart.models import make_model, make_tokenizer, student
from nemo_rl.recipes import find_recipe


def write_run(directory: Path, accuracies: Mapping[int, float]) -> Path:
    """Return the directory of a run with a checkpoint of each step, whose weights are those of seed `step`."""
    return _write(directory, accuracies, lambda step, policy: _save_model(policy / "weights", step))


def write_lora_run(directory: Path, accuracies: Mapping[int, float]) -> Path:
    """Return the directory of a run with an adapter of seed `step` for each step, on the model in `directory`/base."""
    base = _save_model(directory.parent / "base", 1)

    def save(step: int, policy: Path) -> None:
        torch.manual_seed(step)
        config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
        model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        model.save_pretrained(policy / "adapter")
        make_tokenizer().save_pretrained(policy / "tokenizer")

    return _write(directory, accuracies, save, f"policy.model_name={base}")


def write_policies_run(directory: Path, steps: Sequence[int]) -> Path:
    """Return the directory of a run of the recipe `self_play` with adapters of its policies, of which `start` has none
    of effect, on the model in `directory`/base."""
    base = _save_model(directory.parent / "base", 1)

    def save(step: int, policy: Path) -> None:
        for index, name in enumerate(("first", "second", "start")):
            torch.manual_seed(10 * step + index)
            config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=name == "start")
            model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
            model.save_pretrained(policy / "adapters" / name)
        make_tokenizer().save_pretrained(policy / "tokenizer")

    return _write(directory, dict.fromkeys(steps, 0.5), save, f"policy.model_name={base}", recipe="self_play")


def _save_model(directory: Path, seed: int) -> Path:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, student(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that answers differ by their questions
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _write(
    directory: Path,
    accuracies: Mapping[int, float],
    save: Callable[[int, Path], Any],
    *overrides: str,
    recipe: str = "quickstart",
) -> Path:
    config = resolved_yaml(load_config(find_recipe(recipe), [f"logger.log_dir={directory.parent}", *overrides]))
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(config)
    store = CheckpointStore(CheckpointingConfig(metric_name="val:reward"), directory / "checkpoints")
    lines: list[dict[str, float]] = [{"step": 0, "validation/reward": 0.25, "validation/accuracy": 0.25}]
    for step, accuracy in accuracies.items():
        path = store.begin(step)
        (path / "config.yaml").write_text(config)
        save(step, path / "policy")
        measured = {"val:reward": accuracy, "val:accuracy": accuracy, "train:reward": accuracy / 2}
        store.commit(path, TrainingInfo(step, 32 * step, 0, measured))
        validation = {"validation/reward": accuracy, "validation/accuracy": accuracy}
        lines += [{"step": step, "train/reward": accuracy / 2}, {"step": step, **validation}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
