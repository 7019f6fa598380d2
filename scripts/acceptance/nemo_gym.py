"""Does the quickstart's model learn from NeMo Gym? One run that starts and stops a stack, for docs/benchmarks.md.

uv run scripts/acceptance/nemo_gym.py [--steps 60]

Two environments in turn: reasoning_gym and mcqa ask for words backward. Rewards are those of training, each word asked
once: means of the first and the last steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
AGENTS = ("reasoning_gym_simple_agent", "mcqa_simple_agent")
WINDOW = 5  # steps at each end that a figure is the mean of
GAIN = 0.1  # of the mean reward on reasoning_gym
MAX_LOGPROB_ERROR = 1e-4


def run(directory: Path, *overrides: str) -> tuple[list[dict[str, float]], float]:
    """Return the lines of metrics.jsonl, and the seconds that the run took with everything it started."""
    environment = {**os.environ, "NEMO_GYM_DATA": str(directory)}
    subprocess.run(
        [sys.executable, "examples/nemo_gym/make_rows.py", "quickstart"], cwd=ROOT, check=True, env=environment
    )
    command = [sys.executable, "examples/nemo_gym/run_grpo_nemo_gym.py", f"logger.log_dir={directory}", *overrides]
    started = time.monotonic()
    with (directory / "output.txt").open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=3600)
    if done.returncode:
        sys.exit((directory / "output.txt").read_text()[-4000:])
    seconds = time.monotonic() - started
    lines = (next(directory.glob("exp_*")) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], seconds


def ends(rows: Sequence[dict[str, float]], name: str) -> tuple[float, float]:
    """Return the mean of a metric over the first and over the last steps that have it."""
    values = [row[name] for row in rows if name in row]
    return statistics.fmean(values[:WINDOW]), statistics.fmean(values[-WINDOW:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as directory:
        rows, seconds = run(Path(directory), f"grpo.max_num_steps={steps}")
    trained = [row for row in rows if "train/loss" in row]
    rewards = {agent: ends(trained, f"train/env/{agent}/reward_mean") for agent in AGENTS}
    failed = sum(value for row in trained for name, value in row.items() if name.startswith("train/failures/"))
    worst = max(row["train/max_logprob_error"] for row in trained)
    print("| environment | reward, first and last 5 steps |\n|---|---|")
    for agent, (first, last) in rewards.items():
        print(f"| {agent} | {first:.3f} -> {last:.3f} |")
    rollouts = sum(row["train/num_rollouts"] for row in trained)
    print(f"{len(trained)} steps in {seconds:.0f} s; {failed:.0f} of {rollouts:.0f} rollouts failed; ", end="")
    print(f"max_logprob_error {worst:.1e} [{MAX_LOGPROB_ERROR:g}]")
    first, last = rewards[AGENTS[0]]
    return 0 if last >= first + GAIN and worst <= MAX_LOGPROB_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
