"""A reward model from preferences to GRPO: its score rises, and the right answers beside it.

uv run scripts/acceptance/reward_model.py           run_rm.py whole, then 80 steps of examples/configs/reward_model.yaml
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(script: str, log_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    """One run in a process of its own; the lines of its metrics."""
    subprocess.run(
        [sys.executable, f"examples/{script}", *arguments, f"logger.log_dir={log_dir}"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=3600,
    )
    lines = (next(log_dir.glob("exp_*")) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def main(steps: int) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "reward_model"
        trained = run("run_rm.py", Path(scratch) / "rm", f"checkpointing.checkpoint_dir={directory}")
        print(f"pairs ranked right: {max(values(trained, 'validation/pair_accuracy')):.3f}", flush=True)
        grpo = run(
            "run_grpo.py",
            Path(scratch) / "grpo",
            "--config",
            "reward_model.yaml",
            f"scorers.rm.model_name={directory}",
            f"grpo.max_num_steps={steps}",
            "grpo.val_period=20",
        )
    scores = values(grpo, "train/reward")
    tenth = max(1, len(scores) // 10)
    first, last = sum(scores[:tenth]) / tenth, sum(scores[-tenth:]) / tenth
    print("| | first | last |\n|---|---|---|")
    print(f"| mean score of the reward model | {first:.3f} | {last:.3f} |")
    for name in ("accuracy", "greedy_accuracy"):
        measured = values(grpo, f"validation/{name}")
        print(f"| {name} of the right answers | {measured[0]:.3f} | {measured[-1]:.3f} |")
    return last > first


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    sys.exit(0 if main(parser.parse_args().steps) else 1)
