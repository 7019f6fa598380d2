"""Collections that are killed, cut in chunks and repeated, for docs/benchmarks.md.

uv run scripts/acceptance/collect.py [--size 1000] [--repeats 4] [--backend hf] [--model nemo_rl/quickstart]

- Killed: SIGKILL at a random point five times, each time resumed. The union is complete, no key is there twice, what
  was finished is not generated again (its bytes stay), and another configuration is refused with the difference.
- Chunks: 4 chunks x 2 seeds, merged, equal one collection of both seeds, byte by byte but for the rows' `timings`.
- Repeated: the same seed a second time gives the same rollouts.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl.collect.merge import merge

ROOT = Path(__file__).parents[2]
KILLS = 5
DEADLINE_S = 3600.0


class Collection:
    """`nemo-rl collect` of the quickstart's task into one directory."""

    def __init__(self, directory: Path, overrides: Sequence[str]) -> None:
        self.directory = directory
        self._overrides = overrides
        self.output = directory.with_name(f"{directory.name}.txt")

    def command(self, *overrides: str) -> list[str]:
        code = "import sys; from nemo_rl.cli import run; sys.exit(run(sys.argv[1:]))"
        return [
            sys.executable,
            "-c",
            code,
            "collect",
            f"collect.output_dir={self.directory}",
            *self._overrides,
            *overrides,
        ]

    def start(self, *overrides: str) -> "subprocess.Popen[bytes]":
        output = self.output.open("ab")
        return subprocess.Popen(
            self.command(*overrides), cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )

    def run(self, *overrides: str) -> None:
        process = self.start(*overrides)
        if process.wait(DEADLINE_S):
            sys.exit(f"a collection ended with {process.returncode}:\n{self.output.read_text()[-3000:]}")

    def lines(self, seed: int = 0) -> list[bytes]:
        path = self.directory / f"rollouts-rs{seed}.jsonl"
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def killed(collection: Collection, num_rollouts: int, draw: random.Random) -> list[str]:
    """Describe what happened at each kill."""
    told = []
    for number in range(KILLS):
        before = collection.lines()
        left = num_rollouts - len(before)
        target = len(before) + draw.randrange(1, max(2, left // (KILLS - number + 1)))
        process = collection.start()
        deadline = time.monotonic() + DEADLINE_S
        while len(collection.lines()) < target and process.poll() is None:
            if time.monotonic() > deadline:
                sys.exit("no rollouts before the deadline")
            time.sleep(draw.random() * 0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        after = collection.lines()
        whole = after if not after or after[-1].endswith(b"\n") else after[:-1]
        check(whole[: len(before)] == [line for line in before if line.endswith(b"\n")], "finished rows have changed")
        told.append(f"{len(before)} -> {len(after)}")
    collection.run()
    return told


def check(condition: bool, problem: str) -> None:
    if not condition:
        sys.exit(f"FAILED: {problem}")


def keys(lines: Sequence[bytes]) -> list[tuple[int, int, int]]:
    rows = [json.loads(line) for line in lines]
    return [(row["seed"], row["task_index"], row["rollout_index"]) for row in rows]


def untimed(path: Path) -> list[str]:
    """Return the lines without their timings, otherwise byte for byte."""
    lines = []
    for line in path.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        part = json.dumps({"timings": row["timings"]})[1:-1]
        check(f", {part}" in line, "timings are not where they were")
        lines.append(line.replace(f", {part}", "", 1))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--chunked-size", type=int, default=200, help="tasks of the comparison of chunks")
    parser.add_argument("--backend", default="hf")
    parser.add_argument("--model", default="nemo_rl/quickstart")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parsed = parser.parse_args()
    num_rollouts = parsed.size * parsed.repeats
    shared = (f"server.backend={parsed.backend}", f"policy.model_name={parsed.model}", "logger.progress=false")
    whole = (*shared, f"collect.limit={parsed.size}", f"collect.num_repeats={parsed.repeats}", "collect.concurrency=64")
    with tempfile.TemporaryDirectory() as directory:
        collection = Collection(Path(directory) / "killed", whole)
        began = time.monotonic()
        told = killed(collection, num_rollouts, random.Random(parsed.seed))
        found = keys(collection.lines())
        check(len(found) == len(set(found)) == num_rollouts, f"{len(set(found))} keys in {len(found)} rows")
        print(f"killed {KILLS} times ({', '.join(told)} rows): {num_rollouts} rollouts, each once,", end=" ")
        print(f"{time.monotonic() - began:.0f} s")
        refused = subprocess.run(
            collection.command("policy.generation.temperature=0.5"), cwd=ROOT, capture_output=True, text=True
        )
        check(refused.returncode == 2 and "temperature: was 1.0, is 0.5" in refused.stderr, refused.stderr[-2000:])
        print(f"another temperature: exit code {refused.returncode}\n{refused.stderr.strip().splitlines()[-1]}")

        small = (*shared, f"collect.limit={parsed.chunked_size}", "collect.num_repeats=2", "collect.concurrency=64")
        unchunked, chunked = (Collection(Path(directory) / name, small) for name in ("unchunked", "chunked"))
        unchunked.run("collect.seeds=0,1")
        for chunk in range(4):
            chunked.run("collect.seeds=0,1", f"collect.chunk={chunk}/4")
        merged = [untimed(merge(one.directory).rollouts) for one in (unchunked, chunked)]
        same = sum(a == b for a, b in zip(*merged, strict=True))
        print(f"4 chunks x 2 seeds: {same} of {len(merged[0])} merged lines are those of the unchunked collection")
        again = Collection(Path(directory) / "again", small)
        again.run("collect.seeds=0,1")
        repeated = untimed(merge(again.directory).rollouts)
        equal = sum(a == b for a, b in zip(merged[0], repeated, strict=True))
        print(f"the same seeds again: {equal} of {len(repeated)} lines are the same ({parsed.backend})")
        exact = parsed.backend == "hf"
        return 0 if not exact or (same == len(merged[0]) and equal == len(repeated)) else 1


if __name__ == "__main__":
    sys.exit(main())
