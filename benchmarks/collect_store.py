"""The store of a collection at scale: rollouts a second, memory, resume, merge, profile.

Each stage runs in a process of its own on one core; the files are deleted at the end. A rollout is a trajectory of
three short messages made a row and appended, as `nemo-rl collect` does, without any generation.

    uv run benchmarks/collect_store.py --tasks 100000 --repeats 16
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from nemo_rl.collect.merge import merge
from nemo_rl.collect.profile import profile
from nemo_rl.collect.profile_report import write_profile
from nemo_rl.collect.shards import Chunk, KeySpace, RolloutKey, Task, write_tasks
from nemo_rl.collect.store import RolloutStore
from nemo_rl.experience.rollout_rows import rollout_row
from nemo_rl.types import Failure, FailureClass, Message, Prompt, StopReason, TokenizedMessage, Trajectory

MIB = 1 << 20
FAILED_SHARE = 0.01


class Watch:
    """Seconds, and growth of this process's memory, since it was made."""

    def __init__(self) -> None:
        self._memory = psutil.Process().memory_info().rss
        self._began = time.perf_counter()

    def figures(self, count: int) -> dict[str, float]:
        status = Path("/proc/self/status").read_text()
        (peak_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        growth = peak_kib * 1024 - self._memory
        return {"rollouts": count, "s": time.perf_counter() - self._began, "growth_mib": growth / MIB}


def collect(directory: Path, tasks: int, repeats: int, chunks: int) -> dict[str, float]:
    """Append every rollout; one in a hundred fails once before."""
    draw = random.Random(0)
    watch, appended = Watch(), 0
    for chunk in range(chunks):
        with opened(directory, tasks, repeats, Chunk(chunk, chunks)) as store:
            while store.num_missing:
                for key in store.missing():
                    if draw.random() < FAILED_SHARE:
                        store.append_failure(key, Failure(FailureClass.INFRA, "GenerationError: simulated"))
                        continue
                    store.append(key, rollout_row(trajectory(key, draw)))
                    appended += 1
            store.finish()
    return watch.figures(appended)


def resume(directory: Path, tasks: int, repeats: int, chunks: int) -> dict[str, float]:
    """Open every shard and ask for what is missing."""
    watch, count = Watch(), 0
    for chunk in range(chunks):
        with opened(directory, tasks, repeats, Chunk(chunk, chunks)) as store:
            count += store.num_finished + len(list(store.missing()))
    return watch.figures(count)


def joined(directory: Path, tasks: int, repeats: int, chunks: int) -> dict[str, float]:
    watch = Watch()
    return watch.figures(merge(directory).num_rollouts)


def profiled(directory: Path, tasks: int, repeats: int, chunks: int) -> dict[str, float]:
    watch = Watch()
    measured = profile(directory)
    write_profile(measured, directory)
    return watch.figures(measured.summaries[0].num_rollouts)


STAGES: dict[str, Callable[[Path, int, int, int], dict[str, float]]] = {
    "collect": collect,
    "resume": resume,
    "merge": joined,
    "profile": profiled,
}


def opened(directory: Path, tasks: int, repeats: int, chunk: Chunk) -> RolloutStore:
    keys = KeySpace(tasks, repeats, chunk if chunk.count > 1 else None)
    return RolloutStore.open(directory, seed=0, keys=keys, identity={"model": "simulated"}, max_attempts=50)


def trajectory(key: RolloutKey, draw: random.Random) -> Trajectory:
    """Return a rollout as an engine would; correct in a share of tries that its task determines."""
    is_right = draw.random() < key.task_index % 17 / 16
    answer = str(key.task_index) if is_right else str(draw.randrange(5))
    question = Message("user", f"What is {key.task_index} + 0?")
    return Trajectory(
        prompt=Prompt(f"{key.task_index}", "math", (question,), dataset="sums"),
        group_id=f"{key.task_index}",
        generation_index=key.rollout_index,
        message_log=(
            TokenizedMessage(Message("system", "You add numbers."), (1, 2, 3)),
            TokenizedMessage(question, (4, 5, 6, 7)),
            TokenizedMessage(Message("assistant", answer), (8, 9), (-0.5, -0.25)),
        ),
        stop_reason=StopReason.DONE,
        rewards={"correct": float(is_right)},
        answer=answer,
        num_turns=1,
    )


def input_tasks(count: int) -> Iterator[Task]:
    return (Task(f"{i}", "sums", "math", {"question": f"What is {i} + 0?", "answer": i}) for i in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.stage:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        figures = STAGES[parsed.stage](parsed.directory, parsed.tasks, parsed.repeats, parsed.chunks)
        print(json.dumps(figures))
        return
    print("| stage | rollouts | s | rollouts a second | growth of memory, MiB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="collect_store_") as directory:
        write_tasks(directory, input_tasks(parsed.tasks))
        for stage in STAGES:
            command = [sys.executable, __file__, *sys.argv[1:], "--stage", stage, "--directory", directory]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(row(stage, **json.loads(output.splitlines()[-1])), flush=True)


def row(stage: str, rollouts: int, s: float, growth_mib: float) -> str:
    return f"| {stage} | {rollouts:,} | {s:.1f} | {rollouts / s:,.0f} | {growth_mib:.0f} |"


if __name__ == "__main__":
    main()
