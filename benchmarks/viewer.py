"""The viewer's index of a large collection: indexing, memory, filters, resuming; beside it, reading the whole file.
And the live lag: from a line on the disk to the page that shows it, with a client that follows as a browser does.

python benchmarks/viewer.py [--rollouts 1600000] [--directory DIR]

The peer's way is that of viewers that parse every line and keep the objects; it reads the first tenth of the file, and
its memory and seconds for the whole are ten times that.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout

from nemo_rl.viewer.index import Query, RolloutIndex

NUM_RUNS = 20  # in the directory whose newest run is followed
NUM_STEPS, NUM_ROLLOUTS = 150, 256  # of the followed run before it goes on
NUM_FOLLOWED = 40
LAG_TIMEOUT_S = 30.0

QUERIES = {
    "env": Query(env="words"),
    "reward range": Query(min_reward=0.2, max_reward=0.3),
    "longest truncated": Query(stop="truncated", sort="-tokens"),
    "failures": Query(failure="any"),
    "one task's repeats": Query(task_index=1234),
}


def write_collection(path: Path, num_rollouts: int) -> None:
    """Write rollouts of about 650 bytes, 16 a task."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(2000)]
    with path.open("w") as file:
        for number in range(num_rollouts):
            task, repeat = divmod(number, 16)
            row = {
                "task_index": task,
                "rollout_index": repeat,
                "seed": 0,
                "prompt_id": f"{task:016x}",
                "dataset": "words",
                "task_name": ("math", "words")[task % 2],
                "stop_reason": "truncated" if number % 50 == 0 else "done",
                "reward": round(rng.random(), 3),
                "rewards": {"words": 1.0},
                "answer": words[number % 2000],
                "num_turns": 1,
                "num_tokens": 90,
                "num_generated_tokens": rng.randrange(4000),
                "timings": {"generation_s": 0.5, "environment_s": 0.01, "total_s": 0.52, "scoring_s": 0.0},
                "messages": [
                    {"role": "user", "content": " ".join(rng.choices(words, k=16))},
                    {"role": "assistant", "content": " ".join(rng.choices(words, k=16))},
                ],
            }
            file.write(json.dumps(row) + "\n")


def measure_index(path: Path, cache: Path) -> dict[str, Any]:
    """Return the numbers of indexing, filtering and a second start."""
    wall, cpu = time.perf_counter(), time.process_time()
    index = RolloutIndex(path, cache=cache)
    first_rows = 0.0
    while index.advance(budget_s=0.2):
        first_rows = first_rows or time.perf_counter() - wall
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    result: dict[str, Any] = {
        "rollouts": len(index),
        "GB": index.end / 1e9,
        "first rows shown (s)": first_rows or wall,
        "indexing (MB/s of one core)": index.end / cpu / 1e6,
        "indexing (MB/s)": index.end / wall / 1e6,
    }
    for name, query in QUERIES.items():
        begun = time.perf_counter()
        index.select(query)
        result[f"filter: {name} (ms)"] = 1e3 * (time.perf_counter() - begun)
    begun = time.perf_counter()
    index.read(len(index) - 1)
    result["read one rollout (ms)"] = 1e3 * (time.perf_counter() - begun)
    index.close()
    begun = time.perf_counter()
    RolloutIndex(path, cache=cache).complete()
    result["second start (s)"] = time.perf_counter() - begun
    result["peak memory (MiB)"] = _peak_mib()
    return result


def measure_whole_file(path: Path) -> dict[str, Any]:
    """Return the numbers of parsing every line and keeping it, from the first tenth of the file."""
    size, read, rows = path.stat().st_size, 0, []
    before, cpu = _peak_mib(), time.process_time()
    with path.open("rb") as file:
        for line in file:
            rows.append(json.loads(line))
            read += len(line)
            if read > size / 10:
                break
    cpu = time.process_time() - cpu
    begun = time.perf_counter()
    sum(row["task_name"] == "words" for row in rows)
    return {
        "reading (MB/s of one core)": read / cpu / 1e6,
        "until it opens (s of one core)": cpu * size / read,
        "filter: task (ms)": 1e3 * (time.perf_counter() - begun) * size / read,
        "memory of the whole (MiB)": (_peak_mib() - before) * size / read,
    }


def measure_lag(directory: Path) -> dict[str, Any]:
    """Return the seconds from the lines of a step on the disk to the run's page that shows them."""
    for number in range(NUM_RUNS):
        for step in range(1, NUM_STEPS + 1 if number == 0 else 3):
            _append_step(directory / "runs" / f"exp_{number:03}", step)
    command = [sys.executable, "-m", "nemo_rl", "view", str(directory / "runs")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as viewer:
        try:
            assert viewer.stdout is not None
            address, token = re.findall(r"(http://\S+)/\?token=(\S+)", viewer.stdout.readline())[0]
            lags = sorted(asyncio.run(_follow(directory / "runs" / "exp_000", address, token)))
        finally:
            viewer.terminate()
    load = os.getloadavg()[0]
    return {
        "median (s)": lags[len(lags) // 2],
        "95% (s)": lags[-len(lags) // 20],
        "longest (s)": lags[-1],
        "load": load,
    }


async def _follow(run: Path, address: str, token: str) -> list[float]:
    """Append steps to a run, and return how long each took to be on the page that a follower fetches when told to."""
    headers, lags = {"Authorization": f"Bearer {token}"}, []
    page = f"{address}/s/{run.name}"
    async with (
        ClientSession(headers=headers, timeout=ClientTimeout(total=None)) as client,
        client.get(f"{address}/events?source={run.name}") as events,
    ):
        for step in range(NUM_STEPS + 1, NUM_STEPS + 1 + NUM_FOLLOWED):
            await asyncio.sleep(random.uniform(0.05, 1.0))
            _append_step(run, step)
            begun = time.perf_counter()
            async with asyncio.timeout(LAG_TIMEOUT_S):
                while f"step {step}<" not in await _read(client, page):
                    while not (await events.content.readline()).startswith(b"data:"):
                        pass
            lags.append(time.perf_counter() - begun)
    return lags


async def _read(client: ClientSession, url: str) -> str:
    async with client.get(url) as answer:
        answer.raise_for_status()
        return await answer.text()


def _append_step(run: Path, step: int) -> None:
    """Write a step as a run does: its rollouts, then its metrics."""
    (run / "rollouts").mkdir(parents=True, exist_ok=True)
    with (run / "rollouts" / "train.jsonl").open("a") as file:
        for number in range(NUM_ROLLOUTS):
            group, index = divmod(number, 8)
            messages = [{"role": "user", "content": "question " * 8}, {"role": "assistant", "content": "answer " * 20}]
            row = {"step": step, "group_id": f"{step}:{group}", "prompt_id": f"p{group}", "task_name": "math"}
            row |= {"generation_index": index, "stop_reason": "done", "reward": float(index % 2), "messages": messages}
            file.write(json.dumps(row) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "train/reward": 0.5, "timing/train/total_step_time": 1.0}) + "\n")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _in_a_process(measure: Callable[..., dict[str, Any]], *arguments: Path) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    """Write the collection, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_600_000)
    parser.add_argument("--directory", type=Path, help="where the collection is written; default: a temporary one")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=parsed.directory) as directory:
        path = Path(directory) / "rollouts-rs0.jsonl"
        write_collection(path, parsed.rollouts)
        results = {
            "index": _in_a_process(measure_index, path, Path(directory) / "cache"),
            "whole file": _in_a_process(measure_whole_file, path),
            "live lag": measure_lag(Path(directory)),
        }
    for name, numbers in results.items():
        for quantity, value in numbers.items():
            print(
                f"{name:<12}{quantity:<36}{value:>12,.3g}"
                if value < 1000
                else f"{name:<12}{quantity:<36}{value:>12,.0f}"
            )


if __name__ == "__main__":
    main()
