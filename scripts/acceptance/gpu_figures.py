"""The page of scripts/acceptance/gpu.py: outcomes, figures of its runs, ends of failed logs; standard library only.

python3 scripts/acceptance/gpu_figures.py DIRECTORY                  print the page again
python3 scripts/acceptance/gpu_figures.py DIRECTORY --rising NAME    exit code 1 unless that run's reward has risen
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
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
SHOWN_LINES = 15  # at the end of a failed line's log
SENT_BYTES = 2**20  # at the end of each file of the archive
SENT_FILES = ("figures.md", "outcomes.json", "gpu_*.json", "logs/*")
SENT_FILES += tuple(f"runs/*/exp_*/{pattern}" for pattern in ("*.json*", "*.yaml", "logs/*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rising", metavar="NAME")
    arguments = parser.parse_args()
    if arguments.rising is not None:
        return report_rise(rewards(read_steps(arguments.directory / "runs" / arguments.rising)))
    print(page(arguments.directory))
    return 0


def page(directory: Path) -> str:
    """Return the page of a directory in Markdown."""
    outcomes = json.loads(read_text(directory / "outcomes.json") or '{"gpus": 1, "lines": []}')
    parts = [
        f"# Figures of {time.strftime('%Y-%m-%d', time.gmtime())}",
        "\n".join(f"- {fact}" for fact in machine_facts()),
        table(("line", "outcome", "seconds", "decides"),
              ((o["name"], f"{o['status']} {o['detail']}".strip(), o["seconds"], o["decides"])
               for o in outcomes["lines"])),
        table(("run", *PHASES, "MFU", "peak GB"), run_rows(directory, outcomes["gpus"])),
        trainer_table(directory),
        *failures(directory, outcomes["lines"]),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def machine_facts() -> list[str]:
    """Return what the figures depend on: GPUs and driver, host, commit."""
    gpus = query_gpu("name,memory.total,driver_version").splitlines()
    host_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    commit = output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty").strip()
    return [
        f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU that nvidia-smi shows",
        f"host: {os.cpu_count()} CPUs, {host_gb:.0f} GB, Python {sys.version.split()[0]}",
        f"commit {commit}" if commit else "commit unknown: no git here",
    ]


def table(head: Sequence[str], rows: Iterator[Sequence[Any]] | Sequence[Sequence[Any]]) -> str:
    """Return a table, empty if it has no rows; `|` in a cell would end the cell."""
    lines = ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) if lines else ""


def run_rows(directory: Path, num_gpus: int) -> Iterator[list[str]]:
    """Yield the figures of each training run: medians over its steps but the first, which compiles and fills caches."""
    gpu = query_gpu("name")
    for run in sorted(path for path in (directory / "runs").glob("*") if path.is_dir()):
        steps = read_steps(run)[1:]
        cells = [median_of(steps, names) for names in PHASES.values()]
        peak = peak_gb(directory / "logs" / f"{run.name}.memory")
        yield [run.name, *cells, utilization(steps, gpu, num_gpus), peak]


def trainer_table(directory: Path) -> str:
    """Return the figures of gpu_trainer.py."""
    rows = [
        (name, figure, f"{value:.4g}" if isinstance(value, float) else value)
        for path in sorted(directory.glob("gpu_*.json"))
        for parts in [json.loads(read_text(path) or "{}")]
        for name, found in parts.items()
        if isinstance(found, dict)
        for figure, value in found.items()
    ]
    return table(("trainer", "figure", "value"), rows)


def failures(directory: Path, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the command and the end of the log of each line that was run and failed."""
    for line in lines:
        if line["status"] in ("FAILED", "TIMED OUT"):
            log = read_text(directory / "logs" / f"{line['name']}.log").splitlines()[-SHOWN_LINES:]
            yield "\n".join([f"## {line['name']}", "", "```", f"$ {line['command']}", *log, "```"])


def write_archive(directory: Path) -> None:
    """Write to_send.tar.gz: the page, and the ends of logs, metrics and configurations of runs."""
    with tarfile.open(directory / "to_send.tar.gz", "w:gz") as archive:
        for path in sorted({path for pattern in SENT_FILES for path in directory.glob(pattern) if path.is_file()}):
            content = path.read_bytes()[-SENT_BYTES:]
            entry = tarfile.TarInfo(f"{directory.name}/{path.relative_to(directory)}")
            entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(content))


@contextlib.contextmanager
def watch_memory(path: Path) -> Iterator[None]:
    """Let nvidia-smi write the memory in use of each GPU, in MiB, into a file once a second."""
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop=1")
    with path.open("w") as output:
        try:
            watcher = subprocess.Popen(query, stdout=output, stderr=subprocess.DEVNULL)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            watcher.kill()
            watcher.wait()


def query_gpu(fields: str) -> str:
    """Return one line per GPU with fields of nvidia-smi; empty without it."""
    return output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def output_of(*command: str) -> str:
    """Return what a command prints; empty where it fails or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step of a run's newest directory."""
    files = sorted(directory.glob("exp_*/metrics.jsonl"))
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []
    return [row for row in rows if "train/loss" in row]


def median_of(steps: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    values = [float(step[name]) for step in steps for name in names if name in step]
    return f"{statistics.median(values):.4g}" if values else "-"


def utilization(steps: Sequence[dict[str, Any]], gpu: str, num_gpus: int) -> str:
    """Return the share of the peak in bfloat16 of all of the list's GPUs that training reached (MFU)."""
    rates = [float(step[FLOPS]) for step in steps if FLOPS in step]
    peaks = [peak for name, peak in PEAK_FLOPS.items() if name in gpu]
    if not rates or not peaks:
        return "-"
    return f"{statistics.median(rates) / (peaks[0] * num_gpus):.3f}"


def read_text(path: Path) -> str:
    return path.read_text(errors="replace").strip() if path.is_file() else ""


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
