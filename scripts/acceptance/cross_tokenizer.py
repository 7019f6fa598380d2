"""Does a teacher with another tokenizer teach? Whole runs of a minute or two; figures for docs/benchmarks.md.

uv run scripts/acceptance/cross_tokenizer.py             both ways of matching tokens
uv run scripts/acceptance/cross_tokenizer.py prefix      one of them

The student writes letters, its teacher's tokens hold one letter or two. The validation error, sampled and greedy, has
to fall with the default, `prefix`; `identical` (GOLD with ULD) is there to compare.
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
MATCHINGS = ("prefix", "identical")
ERROR_FALLS_BY = 0.2  # at least, sampled and greedy


def run(matching: str, overrides: list[str]) -> bool:
    """Print a row of the table; return whether both validation errors decreased."""
    with tempfile.TemporaryDirectory() as log_dir:
        started = time.monotonic()
        subprocess.run(
            [
                sys.executable,
                "examples/run_distillation.py",
                "--config",
                "distillation_cross_tokenizer.yaml",
                f"++loss_fn.cross_tokenizer.matching={matching}",
                "checkpointing.enabled=false",
                f"logger.log_dir={log_dir}",
                *overrides,
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=3600,
        )
        seconds = time.monotonic() - started
        lines = (next(Path(log_dir).glob("exp_*")) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    validations = [row for row in rows if "validation/accuracy" in row]
    last_step = next(row for row in reversed(rows) if "train/cross_tokenizer/target_mass" in row)
    cells, falls = [], True
    for name in ("accuracy", "greedy_accuracy"):
        before, after = (1 - validations[place][f"validation/{name}"] for place in (0, -1))
        cells.append(f"{before:.3f} -> {after:.3f}")
        falls &= before - after >= ERROR_FALLS_BY
    mass = last_step["train/cross_tokenizer/target_mass"]
    ratio = last_step["train/cross_tokenizer/teacher_tokens_per_token"]
    print(f"| {matching} | {cells[0]} | {cells[1]} | {mass:.3f} | {ratio:.2f} | {seconds:.0f} | {falls} |", flush=True)
    return falls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matching", nargs="?", choices=MATCHINGS, help="without it both")
    parser.add_argument("--override", action="append", default=[], help="of the run's configuration")
    arguments = parser.parse_args()
    print(
        "| matching | error, sampled | error, greedy | target mass | teacher tokens a token | s | falls |", flush=True
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    wanted = (arguments.matching,) if arguments.matching else MATCHINGS
    falls = {matching: run(matching, arguments.override) for matching in wanted}
    sys.exit(0 if falls.get("prefix", True) else 1)
