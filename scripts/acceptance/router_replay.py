"""Does replay of routes close the gap between engine and trainer? moe.yaml in bfloat16, with replay and without.

uv run scripts/acceptance/router_replay.py [--steps 20] [--seed 0]

Without replay (`mode: observe`) some tokens must go to other experts than the engine's, with it none, and the largest
`train/max_logprob_error` of the steps must be at least halved. The median falls less: in most steps of so small a model
the largest error is one of bfloat16.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODES = ("observe", "R3")
OTHERS, MISSING = "train/moe/other_experts", "train/moe/missing_routes"
ERRORS = ("train/max_logprob_error", "train/token_mult_prob_error")


def run(mode: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Return the metrics of each training step of one run in a process of its own."""
    with tempfile.TemporaryDirectory() as log_dir:
        arguments = (
            "--config",
            str(ROOT / "examples/configs/moe.yaml"),
            f"policy.model_name=nemo_rl/quickstart-moe-{seed}",
            f"grpo.seed={seed}",
            f"policy.router_replay.mode={mode}",
            f"grpo.max_num_steps={steps}",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "checkpointing.enabled=false",
            f"logger.log_dir={log_dir}",
        )
        subprocess.run(
            [sys.executable, "examples/run_grpo.py", *arguments],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            env=dict(os.environ),
            timeout=3600,
        )
        lines = (next(Path(log_dir).glob("exp_*")) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if ERRORS[0] in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = {mode: run(mode, options.seed, options.steps) for mode in MODES}
    print(f"median (range) over {options.steps} steps\n\n| metric | without replay | with |\n|---|---|---|")
    for name in (*ERRORS, OTHERS, "train/moe/live_other_experts", MISSING):
        values = [[row[name] for row in rows[mode]] for mode in MODES]
        cells = " | ".join(f"{statistics.median(v):.5g} ({min(v):.4g} to {max(v):.4g})" for v in values)
        print(f"| `{name}` | {cells} |")
    without, replayed = rows["observe"], rows["R3"]
    largest = {mode: max(row[ERRORS[0]] for row in rows[mode]) for mode in MODES}
    passed = (
        min(row[OTHERS] for row in without) > 0
        and max(row[OTHERS] for row in replayed) == 0
        and max(row[MISSING] for row in replayed) == 0
        and largest["R3"] <= largest["observe"] / 2
    )
    print("passed" if passed else "failed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
