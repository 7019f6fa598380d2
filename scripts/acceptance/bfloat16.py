#!/usr/bin/env python3
"""Train a pretrained model in bfloat16 on vLLM for 20 steps of GRPO, and hold engine and trainer together.

scripts/acceptance/bfloat16.py [--steps N]      needs the development dependencies; minutes on a CPU

Passes where the first refit is verified and `train/token_mult_prob_error` stays below 1.05 in every step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
BAR = 1.05
METRIC = "train/token_mult_prob_error"
REWARD = """
def vowels(messages, metadata):
    text = messages[-1]["content"]
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    from tests.contracts.smollm2 import save_smollm2  # loads torch

    with tempfile.TemporaryDirectory() as directory:
        model = save_smollm2(Path(directory) / "model")
        run(model, Path(directory), steps)
        errors = read_metric(next(Path(directory, "runs").glob("*/metrics.jsonl")))
    print(f"{METRIC} over {len(errors)} steps: at most {max(errors):.4f} [{BAR}]")
    return int(len(errors) != steps or max(errors) >= BAR)


def run(model: Path, directory: Path, steps: int) -> None:
    """Train on the quickstart's prompts for vowels: 4 prompts x 4 responses of at most 32 tokens a step."""
    (directory / "acceptance_reward.py").write_text(REWARD)
    overrides = {
        "policy.model_name": model,
        "policy.precision": "bfloat16",
        "policy.max_total_sequence_length": 128,
        "policy.train_micro_batch_size": 8,
        "policy.generation.max_new_tokens": 32,
        "policy.optimizer.kwargs.lr": "1e-5",
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": steps,
        "grpo.val_period": 0,
        "grpo.val_at_end": "false",
        "grpo.val_at_start": "false",
        "env.vowels.type": "acceptance_reward:vowels",
        "data.default.env_name": "vowels",
        "logger.log_dir": directory / "runs",
    }
    arguments = [f"++{key}={value}" for key, value in overrides.items()]
    subprocess.run([sys.executable, ROOT / "examples" / "run_grpo.py", *arguments], check=True, cwd=directory)


def read_metric(path: Path) -> list[float]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record[METRIC] for record in records if METRIC in record]


if __name__ == "__main__":
    sys.exit(main())
