"""The page of figures of scripts/acceptance/gpu.sh: a table over the runs in its directory; standard library only.

python3 scripts/acceptance/gpu_figures.py DIRECTORY                  the table
python3 scripts/acceptance/gpu_figures.py DIRECTORY --rising NAME    exit code 1 unless that run's reward has risen
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PHASES = {
    "step s": ("timing/train/total_step_time",),
    "generation s": ("timing/train/generation", "timing/train/exposed_generation"),
    "log-probs s": ("timing/train/policy_and_reference_logprobs",),
    "training s": ("timing/train/policy_training",),
    "refit s": ("timing/train/weight_sync",),
    "training FLOP/s": ("performance/train_flops",),
    "tokens/s": ("performance/tokens_per_sec",),
}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # bfloat16, dense (NVIDIA's data sheets)
FLOPS = "performance/train_flops"
ENDS = 10  # steps at either end that the reward is averaged over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rising", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.rising is not None:
        return report_rise(rewards(read_steps(arguments.directory / "runs" / arguments.rising)))
    gpu = read_text(arguments.directory / "gpu")
    print(f"| run | {' | '.join(PHASES)} | MFU | peak GB |\n|---|{'---|' * (len(PHASES) + 2)}")
    for directory in sorted(path for path in (arguments.directory / "runs").glob("*") if path.is_dir()):
        steps = read_steps(directory)[1:]  # the first one compiles and fills caches
        cells = [median_of(steps, names) for names in PHASES.values()]
        cells.append(utilization(steps, gpu, read_text(arguments.directory / f"{directory.name}.gpus")))
        print(
            f"| {directory.name} | {' | '.join(cells)} | {peak_gb(arguments.directory / f'{directory.name}.memory')} |"
        )
    return 0


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step of a run's newest directory."""
    files = sorted(directory.glob("exp_*/metrics.jsonl"))
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []
    return [row for row in rows if "train/loss" in row]


def median_of(steps: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    values = [float(step[name]) for step in steps for name in names if name in step]
    return f"{statistics.median(values):.4g}" if values else "-"


def utilization(steps: Sequence[dict[str, Any]], gpu: str, num_gpus: str) -> str:
    """Return the share of the peak in bfloat16 of all of the run's GPUs that training reached (MFU)."""
    rates = [float(step[FLOPS]) for step in steps if FLOPS in step]
    peaks = [peak for name, peak in PEAK_FLOPS.items() if name in gpu]
    if not rates or not peaks or not num_gpus.isdigit():
        return "-"
    return f"{statistics.median(rates) / (peaks[0] * int(num_gpus)):.3f}"


def read_text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def peak_gb(path: Path) -> str:
    """Return the largest memory in use that nvidia-smi saw, from its lines in MiB."""
    lines = path.read_text().split() if path.is_file() else []
    values = [int(line) for line in lines if line.isdigit()]
    return f"{max(values) * 2**20 / 1e9:.1f}" if values else "-"


def rewards(steps: Sequence[dict[str, Any]]) -> list[float]:
    return [float(step["train/reward"]) for step in steps if "train/reward" in step]


def report_rise(values: Sequence[float]) -> int:
    """Return 0 where the mean of the last steps is above that of the first by more than their scatter."""
    if len(values) < 2 * ENDS:
        print(f"{len(values)} steps have a reward; at least {2 * ENDS} are needed")
        return 1
    first, last = values[:ENDS], values[-ENDS:]
    rise = statistics.fmean(last) - statistics.fmean(first)
    scatter = statistics.stdev(
        [*(v - statistics.fmean(first) for v in first), *(v - statistics.fmean(last) for v in last)]
    )
    print(f"reward {statistics.fmean(first):.3f} at first, {statistics.fmean(last):.3f} at last, scatter {scatter:.3f}")
    return int(rise <= scatter)


if __name__ == "__main__":
    sys.exit(main())
