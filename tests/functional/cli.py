"""Helpers that run the real command line in a process of its own and read what it wrote."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "run_grpo.py"
DEADLINE_S = 560  # of one run, on a machine that may be busy


@dataclass(frozen=True)
class Run:
    returncode: int
    stdout: str
    stderr: str
    directory: Path | None  # the run directory, where one was made

    def metrics(self) -> dict[int, dict[str, float]]:
        """metrics.jsonl by step; all lines of a step merged."""
        assert self.directory is not None, self.stderr
        merged: dict[int, dict[str, float]] = {}
        for line in (self.directory / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            merged.setdefault(row.pop("step"), {}).update(row)
        return merged


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}


def run_directory(log_dir: Path) -> Path | None:
    """Return the newest run directory under `log_dir`."""
    return max(log_dir.glob("exp_*"), default=None)


def run_grpo(log_dir: Path, *arguments: str) -> Run:
    """Run to its end; `log_dir` is where its run directory goes."""
    return run_command_line(SCRIPT, log_dir, *arguments)


def run_command_line(
    script: Path, log_dir: Path, *arguments: str, deadline_s: float = DEADLINE_S, **variables: str
) -> Run:
    """Run any script to its end, with further environment variables."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments, f"logger.log_dir={log_dir}"],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        env={**environment(), **variables},
        cwd=ROOT,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, run_directory(log_dir))
