"""Does the student reach its teacher? Whole runs of the examples, which make both models themselves.

uv run scripts/acceptance/distillation.py           the quickstart of distillation on three seeds, models of their own
uv run scripts/acceptance/distillation.py async     the same with rollouts in the background
uv run scripts/acceptance/distillation.py opd       run_grpo.py with what the teacher says as the advantage
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
LONGEST_S = 300.0
TEACHER_ALONE = ("distillation.max_num_steps=1", "distillation.val_at_end=false")


@dataclass(frozen=True)
class Way:
    """Way of teaching a student."""

    script: str = "examples/run_distillation.py"
    section: str = "distillation"
    overrides: tuple[str, ...] = ()
    share: float = 0.95  # of the teacher's accuracy, asked of the student


WAYS = {
    "sync": Way(),
    "async": Way(
        overrides=(
            "distillation.async_rollouts.enabled=true",
            "distillation.async_rollouts.max_trajectory_age_steps=1",
            "distillation.async_rollouts.in_flight_weight_updates=true",
        )
    ),
    "opd": Way(
        "examples/run_grpo.py",
        "grpo",
        ("grpo.adv_estimator.name=opd", "++teacher.precision=float32"),
        share=0.9,  # what the teacher says of the sampled token alone teaches less than its distribution
    ),
}


def metrics_of(way: Way, seed: int, cache: str, *overrides: str) -> list[dict[str, Any]]:
    """One run in a process of its own."""
    models = (f"policy.model_name=nemo_rl/quickstart-{seed}", f"++teacher.model_name=nemo_rl/quickstart-teacher-{seed}")
    with tempfile.TemporaryDirectory() as log_dir:
        given = (*models, *way.overrides, *overrides, f"{way.section}.seed={seed}", f"logger.log_dir={log_dir}")
        subprocess.run(
            [sys.executable, way.script, *given],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "NEMO_RL_CACHE": cache},
            timeout=3600,
        )
        lines = (next(Path(log_dir).glob("exp_*")) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def run(way: Way, seed: int) -> bool:
    """Its time includes the start and the making of both models."""
    with tempfile.TemporaryDirectory() as cache:
        started = time.monotonic()
        rows = metrics_of(way, seed, cache)
        seconds = time.monotonic() - started
        of_teacher = rows if way.section == "distillation" else metrics_of(Way(), seed, cache, *TEACHER_ALONE)
    teacher = values(of_teacher, "validation/teacher_accuracy")[0]
    student, greedy = values(rows, "validation/accuracy"), values(rows, "validation/greedy_accuracy")
    share = student[-1] / teacher
    passes = share >= way.share and seconds <= LONGEST_S
    print(
        f"| seed {seed} | {teacher:.3f} | {student[0]:.3f} -> {student[-1]:.3f} | {greedy[0]:.3f} -> {greedy[-1]:.3f} "
        f"| {share:.3f} | {seconds:.0f} | {passes} |",
        flush=True,
    )
    return passes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=WAYS, default="sync")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parsed = parser.parse_args()
    print("| run | teacher | student, sampled | greedy | of the teacher | s | as it should |\n" + "|---" * 7 + "|")
    results = [run(WAYS[parsed.what], seed) for seed in parsed.seeds]
    sys.exit(0 if all(results) else 1)
