"""Does replay of routes close the gap between engine and trainer? moe.yaml in bfloat16, with replay and without.

uv run scripts/acceptance/router_replay.py [--steps 20] [--seed 0]

The engine has vLLM's own routers, which round their logits to bfloat16 as on a GPU. Without replay (`mode: observe`)
some tokens must go to other experts than the engine's, with it none, and the largest `train/max_logprob_error` of the
steps must be at least halved. The median falls less: in most steps no token of such a difference is sampled. The last
column is a run as it is on a CPU, with routers in float32, without replay.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN_ROUTERS = "++policy.generation.vllm_kwargs.worker_extension_cls=own_routers.OwnRouters"
RUNS = {
    "without replay": ("policy.router_replay.mode=observe", OWN_ROUTERS),
    "with": ("policy.router_replay.mode=R3", OWN_ROUTERS),
    "float32 routers, without": ("policy.router_replay.mode=observe",),
}
OTHERS, MISSING = "train/moe/other_experts", "train/moe/missing_routes"
ERRORS = ("train/max_logprob_error", "train/token_mult_prob_error")


def run(own: Sequence[str], seed: int, steps: int) -> list[dict[str, float]]:
    """Return the metrics of each training step of one run in a process of its own."""
    with tempfile.TemporaryDirectory() as log_dir:
        arguments = (
            "--config",
            str(ROOT / "examples/configs/moe.yaml"),
            f"policy.model_name=nemo_rl/quickstart-moe-{seed}",
            f"grpo.seed={seed}",
            *own,
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
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            timeout=3600,
        )
        lines = (next(Path(log_dir).glob("exp_*")) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if ERRORS[0] in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = {name: run(own, options.seed, options.steps) for name, own in RUNS.items()}
    print(f"median (range) over {options.steps} steps\n\n| metric | {' | '.join(rows)} |\n|---|---|---|---|")
    for name in (*ERRORS, OTHERS, "train/moe/live_other_experts", MISSING):
        values = [[row[name] for row in each] for each in rows.values()]
        cells = " | ".join(f"{statistics.median(v):.5g} ({min(v):.4g} to {max(v):.4g})" for v in values)
        print(f"| `{name}` | {cells} |")
    without, replayed = rows["without replay"], rows["with"]
    largest = [max(row[ERRORS[0]] for row in each) for each in (without, replayed)]
    passed = (
        statistics.fmean(row[OTHERS] for row in without) > 0
        and max(row[OTHERS] for row in replayed) == 0
        and max(row[MISSING] for row in replayed) == 0
        and largest[1] <= largest[0] / 2
    )
    print("passed" if passed else "failed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
