"""Where the time from the command to the first trained step goes: the quickstart, phase by phase, once installed.

    uv run benchmarks/startup.py                        the quickstart, three times; its model is made before
    uv run benchmarks/startup.py --runs 1 policy.generation.backend=hf

Each run is a process of its own that does what `nemo-rl grpo` does, without validation, and ends after its first step.
A phase is a function of the program: seconds since the process began, seconds that it took, and CPU seconds of this
process and of those that it started, which exceed the wall time where something overlaps. "rest" is what no phase has.
"""

import argparse
import asyncio
import functools
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ONE_STEP = ("grpo.max_num_steps=1", "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0")
DEADLINE_S = 1800.0
# (phase, module that calls the function, its name there)
PHASES = (
    ("dataset", "nemo_rl.launch.resolved_run", "load_prompts"),
    ("model: found, or made at first use", "nemo_rl.launch.resolved_model", "resolve_model"),
    ("tokenizer, chat template", "nemo_rl.launch.resolved_model", "load_tokenizer"),
    ("environments, scorers, agents", "nemo_rl.launch.training", "open_rollout_parts"),
    ("policy: weights, optimizer", "nemo_rl.launch.workers", "LocalPolicy"),
    ("engine: imports, process, weights", "nemo_rl.launch.workers", "make_generation"),
    ("first refit and its verification", "nemo_rl.weight_sync.refit", "TransportWeightSync.publish"),
    ("first rollouts and optimizer step", "nemo_rl.algorithms.loop", "train_one_step"),
)


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all below it."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class Clock:
    """Phases of this process, in the order of their ends."""

    def __init__(self) -> None:
        self.began = psutil.Process().create_time()
        self.rows: list[dict[str, Any]] = []

    def add(self, phase: str, start: float, cpu: float) -> None:
        self.rows.append({"phase": phase, "at": start - self.began, "s": time.time() - start, "cpu": cpu_s() - cpu})

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its first call measured."""
        calls = iter((True,))

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            start, cpu, is_first = time.time(), cpu_s(), next(calls, False)
            result = function(*args, **kwargs)
            if inspect.isawaitable(result):
                return finish(result, start, cpu, is_first)
            if is_first:
                self.add(phase, start, cpu)
            return result

        async def finish(result: Any, start: float, cpu: float, is_first: bool) -> Any:
            value = await result
            if is_first:
                self.add(phase, start, cpu)
            return value

        return run


def run_once(overrides: list[str]) -> None:
    """Run the quickstart to its first step in this process; print the phases as JSON."""
    clock = Clock()
    clock.add("interpreter", clock.began, 0.0)
    start, cpu = time.time(), cpu_s()
    from nemo_rl.launch.recipe_commands import GRPO_JOB
    from nemo_rl.recipes import find_recipe

    config = GRPO_JOB.load(find_recipe("quickstart"), [*ONE_STEP, *overrides])
    clock.add("configuration", start, cpu)
    start, cpu = time.time(), cpu_s()
    from nemo_rl.launch.training import run_training

    clock.add("imports: torch, transformers, datasets", start, cpu)
    for phase, module_name, name in PHASES:
        owner: Any = importlib.import_module(module_name)
        *parents, attribute = name.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, clock.wrap(phase, getattr(owner, attribute)))
    asyncio.run(run_training(config, "startup"))
    print("\n" + json.dumps(clock.rows))


def measure(overrides: list[str]) -> list[dict[str, Any]]:
    """Return the phases of one run in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        words = [f"logger.log_dir={directory}", "logger.progress=false", "checkpointing.enabled=false", *overrides]
        command = [sys.executable, str(Path(__file__).resolve()), "--once", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_args()
    if parsed.once:
        run_once(parsed.overrides)
        return
    measure(parsed.overrides)  # makes the model and warms the caches
    runs = [measure(parsed.overrides) for _ in range(parsed.runs)]
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; medians of {parsed.runs}")
    print("| phase | begins at s | s | CPU s |\n|---|---|---|---|")
    for rows in zip(*runs, strict=True):
        at, s, cpu = (statistics.median(row[name] for row in rows) for name in ("at", "s", "cpu"))
        print(f"| {rows[0]['phase']} | {at:.1f} | {s:.1f} | {cpu:.1f} |")
    ends = [max(row["at"] + row["s"] for row in run) for run in runs]
    rest = [end - sum(row["s"] for row in run) for end, run in zip(ends, runs, strict=True)]
    print(
        f"| rest | | {statistics.median(rest):.1f} | |\n| **first step trained** | {statistics.median(ends):.1f} | | |"
    )


if __name__ == "__main__":
    main()
