"""A run directory with checkpoints of the quickstart's model, as a run of the quickstart writes it."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from nemo_rl.checkpoint import CheckpointStore, TrainingInfo
from nemo_rl.config.loading import load_config, resolved_yaml
from nemo_rl.config.shared_sections import CheckpointingConfig
from nemo_rl.quickstart.models import make_model, make_tokenizer, student
from nemo_rl.recipes import find_recipe


def write_run(directory: Path, accuracies: Mapping[int, float]) -> Path:
    """Return the directory of a run with a checkpoint of each step, whose weights are those of seed `step`."""
    config = resolved_yaml(load_config(find_recipe("quickstart"), [f"logger.log_dir={directory.parent}"]))
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(config)
    store = CheckpointStore(CheckpointingConfig(metric_name="val:reward"), directory / "checkpoints")
    lines: list[dict[str, float]] = [{"step": 0, "validation/reward": 0.25, "validation/accuracy": 0.25}]
    for step, accuracy in accuracies.items():
        path = store.begin(step)
        (path / "config.yaml").write_text(config)
        tokenizer, weights = make_tokenizer(), path / "policy" / "weights"
        model = make_model(tokenizer, student(step))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)  # so that answers differ by their questions
        model.save_pretrained(weights)
        tokenizer.save_pretrained(weights)
        measured = {"val:reward": accuracy, "val:accuracy": accuracy, "train:reward": accuracy / 2}
        store.commit(path, TrainingInfo(step, 32 * step, 0, measured))
        validation = {"validation/reward": accuracy, "validation/accuracy": accuracy}
        lines += [{"step": step, "train/reward": accuracy / 2}, {"step": step, **validation}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
