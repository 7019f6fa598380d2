"""Does the student reach its teacher? Whole runs of examples/run_distillation.py, which makes both models itself.

uv run scripts/acceptance/distillation.py           the quickstart of distillation on three seeds, models of their own
uv run scripts/acceptance/distillation.py async     the same with rollouts in the background
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
SHARE, LONGEST_S = 0.95, 300.0

ASYNC = (
    "distillation.async_rollouts.enabled=true",
    "distillation.async_rollouts.max_trajectory_age_steps=1",
    "distillation.async_rollouts.in_flight_weight_updates=true",
)


def run(seed: int, *arguments: str) -> bool:
    """One run in a process of its own; its time includes the start and the making of both models."""
    models = (f"policy.model_name=nemo_rl/quickstart-{seed}", f"teacher.model_name=nemo_rl/quickstart-teacher-{seed}")
    with tempfile.TemporaryDirectory() as log_dir, tempfile.TemporaryDirectory() as cache:
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "examples/run_distillation.py", *models, *arguments, f"distillation.seed={seed}",
             f"logger.log_dir={log_dir}"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NEMO_RL_CACHE": cache},
            timeout=3600,
        )  # fmt: skip
        seconds = time.monotonic() - started
        lines = (next(Path(log_dir).glob("exp_*")) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    teacher = next(row["validation/teacher_accuracy"] for row in rows if "validation/teacher_accuracy" in row)
    student = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    greedy = [row["validation/greedy_accuracy"] for row in rows if "validation/greedy_accuracy" in row]
    share = student[-1] / teacher
    print(
        f"| seed {seed} | {teacher:.3f} | {student[0]:.3f} -> {student[-1]:.3f} | {greedy[0]:.3f} -> {greedy[-1]:.3f} "
        f"| {share:.3f} | {seconds:.0f} | {share >= SHARE and seconds <= LONGEST_S} |",
        flush=True,
    )
    return share >= SHARE and seconds <= LONGEST_S


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["sync", "async"], default="sync")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parsed = parser.parse_args()
    print("| run | teacher | student, sampled | greedy | of the teacher | s | as it should |\n" + "|---" * 7 + "|")
    results = [run(seed, *(ASYNC if parsed.what == "async" else ())) for seed in parsed.seeds]
    sys.exit(0 if all(results) else 1)
