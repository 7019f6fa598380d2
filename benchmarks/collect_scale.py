"""`nemo-rl collect` at scale, without a model: rollouts a second of all that is not generation, and memory.

A simulated engine answers at once with ready tokens; prompts are read from a file as their turn comes, rendered by the
quickstart's tokenizer, scored by an environment that does nothing, and stored by the runner. One process on one core.

    uv run benchmarks/collect_scale.py --tasks 100000 --repeats 16
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from nemo_rl.collect.runner import CollectionLimits, collect_rollouts
from nemo_rl.collect.shards import KeySpace, Task, write_tasks
from nemo_rl.collect.store import RolloutStore
from nemo_rl.config.data import DatasetConfig, InputDataConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.prompt_sets import load_input
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits
from nemo_rl.quickstart.models import make_tokenizer
from nemo_rl.types import Completion, EnvStep, GenerationRequest, Message, SamplingParams

MIB = 1 << 20
RATE, GROWTH_MIB = 2000.0, 300.0
NUM_TOKENS = 64  # of a response


class SimulatedEngine:
    """Gives up control once for each request, as an engine does, then answers."""

    is_async = True

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._logprobs = (-0.5,) * len(self._token_ids)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        await asyncio.sleep(0)
        for request in requests:
            yield Completion(request.request_id, self._token_ids, self._logprobs, "stop")


class NoEnvironment:
    async def step(
        self, conversations: Sequence[Sequence[Message]], states: Sequence[Mapping[str, Any]]
    ) -> list[EnvStep]:
        return [EnvStep(rewards={"simulated": 1.0}) for _ in conversations]

    async def close(self) -> None: ...


class Watch:
    """Seconds of the processor and of the clock, and growth of memory, since it was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._memory, self._cpu_s, self._began = self._rss(), time.process_time(), time.perf_counter()
        self.peak = self._memory
        self.halfway = 0

    def look(self) -> None:
        self.peak = max(self.peak, self._rss())

    def figures(self) -> dict[str, float]:
        self.look()
        return {
            "s": time.perf_counter() - self._began,
            "cpu_s": time.process_time() - self._cpu_s,
            "growth_mib": (self.peak - self._memory) / MIB,
        }

    def _rss(self) -> int:
        return self._process.memory_info().rss


def write_rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            text = f"What is {number} backward, and what is it twice?"
            file.write(json.dumps({"input": text, "output": str(2 * number)}) + "\n")


async def collect(directory: Path, num_tasks: int, num_repeats: int, concurrency: int) -> dict[str, float]:
    """All rollouts of the file; the watch runs from its opening to the mark that the collection is done."""
    section = DatasetConfig(dataset_name="jsonl", data_path=str(directory / "rows.jsonl"), env_name="simulated")
    encoder = ChatEncoder(make_tokenizer())
    encoder.check()
    dependencies = RolloutDependencies(
        SimulatedEngine([*range(10, 10 + NUM_TOKENS - 1), *encoder.stop_token_ids[:1]]),  # pyright: ignore[reportArgumentType]
        {"simulated": CheckedEnvironment(NoEnvironment(), None)},
        encoder,
        RolloutLimits(max_turns=1, max_total_length=512),
    )
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=encoder.stop_token_ids)
    watch = Watch()
    input_set = load_input(InputDataConfig(input=section))
    rows = (Task(prompt.prompt_id, prompt.dataset, prompt.task_name, row) for prompt, row in input_set.rows())
    tasks = write_tasks(directory / "out", rows)
    opened = watch.figures()
    keys = KeySpace(tasks.num_tasks, num_repeats)
    with RolloutStore.open(directory / "out", seed=0, keys=keys, identity={"data": tasks.digest}) as store:
        counted = 0

        def count(_: object) -> None:
            nonlocal counted
            counted += 1
            if counted % 10_000 == 0:
                watch.look()

        limits = CollectionLimits(concurrency=concurrency)
        await collect_rollouts([store], input_set.prompts, dependencies, sampling, limits=limits, on_rollout=count)
        figures = watch.figures()
        return {"opened_s": opened["s"], "opened_mib": opened["growth_mib"], "rollouts": store.num_finished, **figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=256)
    parsed = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as directory:
        write_rows(Path(directory) / "rows.jsonl", parsed.tasks)
        figures = asyncio.run(collect(Path(directory), parsed.tasks, parsed.repeats, parsed.concurrency))
        size = (Path(directory) / "out" / "rollouts-rs0.jsonl").stat().st_size
    rate, cpu_rate = figures["rollouts"] / figures["s"], figures["rollouts"] / figures["cpu_s"]
    print(
        "| rollouts | file GB | opening s, MiB | s | CPU s | rollouts/s | rollouts / CPU s [2000] | growth MiB [300] |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {figures['rollouts']:,} | {size / 1e9:.2f} | {figures['opened_s']:.1f}, {figures['opened_mib']:.0f} "
        f"| {figures['s']:.0f} | {figures['cpu_s']:.0f} | {rate:,.0f} | {cpu_rate:,.0f} | {figures['growth_mib']:.0f} |"
    )
    return 0 if cpu_rate >= RATE and figures["growth_mib"] <= GROWTH_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
