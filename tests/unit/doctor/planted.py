"""A sound project in a directory, in which tests plant faults."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.quickstart.models import make_model, make_tokenizer, student

REWARDS = """
def fine(messages, metadata):
    return float(messages[-1]["content"] == metadata["answer"])


def broken(messages, metadata):
    raise RuntimeError("no such column")


def lost(messages, metadata):
    return metadata["solution"]


class Stuck:
    async def step(self, conversation, state):
        return None
"""


def make_project(directory: Path) -> dict[str, Any]:
    """Write a small model, rows and rewards; return a sound recipe over them."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, student(0)).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    rows = [{"input": f"Spell {word} backward.", "output": word[::-1]} for word in ("abc", "word", "learn", "spell")]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "planted_rewards.py").write_text(REWARDS)
    return {
        "defaults": "quickstart",
        "policy": {"model_name": str(directory / "model")},
        "data": {
            "_override_": True,
            "train": {"dataset_name": "jsonl", "data_path": str(directory / "train.jsonl")},
            "default": {"env_name": "own"},
        },
        "env": {"_override_": True, "own": {"type": "planted_rewards:fine"}},
        "logger": {"log_dir": str(directory / "runs")},
    }


def write_recipe(directory: Path, values: Mapping[str, Any]) -> str:
    """Write a recipe beside the project; return its path."""
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(dict(values)))
    return str(path)
