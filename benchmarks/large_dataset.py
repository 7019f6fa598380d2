"""Start-up with a large dataset: seconds from the command to the engine's start, and memory, beside a small dataset.

    uv run benchmarks/large_dataset.py                   1,000,000 rows of a JSON Lines file, and the same as a table
    uv run benchmarks/large_dataset.py --rows 200000 data.overlong=refuse

Each run is a process of its own that does what `nemo-rl grpo` does with the quickstart's model, up to the engine: it
loads the recipe and the prompts, checks a sample of them, and takes the first step's prompts in training order.
Memory is the peak of anonymous memory (RssAnon), since a table's pages are the file's.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

KINDS = ("jsonl", "huggingface")
SAMPLE_PERIOD_S = 0.02
SMALL = 1_000  # rows of the dataset to compare with
DEADLINE_S = 1800.0


class Memory(threading.Thread):
    """Samples this process's anonymous memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0

    def run(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            now = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))
            self.peak_mb = max(self.peak_mb, now)
            time.sleep(SAMPLE_PERIOD_S)


def write_rows(path: Path, count: int) -> None:
    """Write questions of about 100 characters with their answers."""
    with path.open("w") as file:
        for index in range(count):
            other = index * 7 % 1_000_003
            question = f"What is {index} plus {other}? Think about the two numbers, then give their sum."
            file.write(json.dumps({"input": question, "output": str(index + other)}) + "\n")


def run_once(overrides: list[str]) -> None:
    """Start a run up to its engine in this process; print its seconds and memory as JSON."""
    memory = Memory()
    memory.start()
    from nemo_rl.launch.recipe_commands import GRPO_JOB
    from nemo_rl.recipes import find_recipe

    config = GRPO_JOB.load(find_recipe("quickstart"), overrides)
    from nemo_rl.data.prompt_loader import PromptLoader
    from nemo_rl.launch.resolved_run import resolve_run

    imported_s = time.time() - psutil.Process().create_time()
    run = asyncio.run(resolve_run(config))
    loader = PromptLoader(run.train.prompts, shuffle=True, seed=config.grpo.seed, max_epochs=1, screen=run.screen)
    loader.take(config.grpo.num_prompts_per_step)
    seconds, cpu_s = time.time() - psutil.Process().create_time(), time.process_time()
    print(
        "\n"
        + json.dumps(
            {
                "s": seconds,
                "imported_s": imported_s,
                "cpu_s": cpu_s,
                "mb": memory.peak_mb,
                "rows": len(run.train.prompts),
            }
        )
    )


def measure(kind: str, rows: int, directory: Path, overrides: list[str]) -> dict[str, float]:
    """Return the figures of one start in a process of its own."""
    folder = directory / str(rows)
    if not folder.is_dir():
        folder.mkdir()
        write_rows(folder / "train.jsonl", rows)
    path = folder / "train.jsonl" if kind == "jsonl" else folder
    dataset = (
        f"{{dataset_name: {kind}, data_path: {path}, input_key: input, output_key: output, env_name: math, size: null}}"
    )
    words = [f"data.train={dataset}", "++data.validation=null", "checkpointing.metric_name=null", "++env.math={}"]
    words += ["policy.max_total_sequence_length=128", f"logger.log_dir={directory}", *overrides]
    command = [sys.executable, str(Path(__file__).resolve()), "--once", *words]
    environment = os.environ | {"HF_DATASETS_CACHE": str(directory / "cache")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S, env=environment)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_args()
    if parsed.once:
        run_once(parsed.overrides)
        return
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(
        "| dataset | rows | s to the engine | of them recipe and imports | CPU s | peak MB |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        for kind in KINDS:
            for rows in (SMALL, parsed.rows):
                if kind == "huggingface":
                    measure(kind, rows, Path(name), parsed.overrides)  # the library converts a new file once
                found = measure(kind, rows, Path(name), parsed.overrides)
                times = f"{found['s']:.1f} | {found['imported_s']:.1f} | {found['cpu_s']:.1f}"
                print(
                    f"| {kind} | {found['rows']:,} | {times} | {found['mb']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
