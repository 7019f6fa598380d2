"""LoRA: a run whose refits bring merged weights against one whose refits bring the adapter, a step of each in turn.

Both are the recipe `lora` in this process. The first table has what a step, its rollouts and its refit take: the
median, and 10 % to 90 %. The second has refits alone, in turns: of merged weights, of the adapter, and of the three
adapters of the recipe `self_play`. It takes about three minutes on two idle cores.

    uv run benchmarks/adapters.py
    uv run benchmarks/adapters.py --steps 40 policy.generation.max_new_tokens=64 policy.generation.ignore_eos=true
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from paired import RECIPE

from nemo_rl.algorithms.checkpoint_writer import CheckpointWriter, restore
from nemo_rl.algorithms.loop import make_observers, train_one_step
from nemo_rl.algorithms.training_progress import TrainingProgress
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.config.loading import load_config
from nemo_rl.launch.training import open_run

LORA, SELF_PLAY = RECIPE.with_name("lora.yaml"), RECIPE.with_name("self_play.yaml")
WARM_UP_STEPS = 3  # the first refits are verified
FIRST_VERSION = 10_000  # of the refits alone; steps have smaller ones
COMMON = (
    "policy.optimizer.kwargs.lr=1e-7",  # both sample alike
    "data.validation=null",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.enabled=false",
    "logger.progress=false",
)
Seconds = dict[str, list[float]]


def timed(call: Callable[..., Awaitable[Any]], seconds: list[float]) -> Callable[..., Awaitable[Any]]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    return run


async def open_recipe(stack: AsyncExitStack, recipe: Path, overrides: Sequence[str]) -> TrainingRun:
    log_dir = stack.enter_context(tempfile.TemporaryDirectory())
    config = load_config(recipe, [*COMMON, *overrides, f"logger.log_dir={log_dir}"])
    return await stack.enter_async_context(open_run(config))


async def start(run: TrainingRun, seconds: Seconds) -> Callable[[], Awaitable[None]]:
    """Refit the engine for the first time; return the call that makes a step and notes what it takes."""
    run.source.next_groups = timed(run.source.next_groups, seconds["rollouts"])  # type: ignore[method-assign]
    run.weight_sync.publish = timed(run.weight_sync.publish, seconds["refit"])  # type: ignore[method-assign]
    training = TrainingProgress(await restore(run), CheckpointWriter(run))
    await run.weight_sync.publish(run.policy, run.generation, weight_version=0)
    seconds["refit"].clear()
    observers = make_observers(run, training)

    async def step() -> None:
        await train_one_step(run, training, observers)

    return timed(step, seconds["step"])


def cell(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    median, low, high = statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{median * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f})"


async def time_refits(runs: Mapping[str, TrainingRun], num_refits: int) -> Seconds:
    """Return the seconds of refits of each run, one of each in turn; no request runs meanwhile."""
    seconds: Seconds = defaultdict(list)
    for version in range(FIRST_VERSION, FIRST_VERSION + WARM_UP_STEPS + num_refits):
        for name, run in runs.items():
            started = time.perf_counter()
            await run.weight_sync.publish(run.policy, run.generation, weight_version=version)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def print_table(header: Sequence[str], rows: Mapping[str, Sequence[list[float]]]) -> None:
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for name, columns in rows.items():
        print(f"| {name} | {' | '.join(cell(column[WARM_UP_STEPS:]) for column in columns)} |")


async def main(num_steps: int, num_refits: int, overrides: Sequence[str]) -> None:
    parts = ("step", "rollouts", "refit")
    async with AsyncExitStack() as stack:
        runs, seconds, steps = {}, {}, []
        for name in ("merged", "separate"):
            runs[name] = await open_recipe(stack, LORA, (*overrides, f"weight_sync.adapter={name}"))
            seconds[name] = defaultdict(list)
            steps.append(await start(runs[name], seconds[name]))
        for _ in range(WARM_UP_STEPS + num_steps):
            for step in steps:
                await step()
        print_table(("adapter", "step ms", *parts[1:]), {n: [own[p] for p in parts] for n, own in seconds.items()})
        runs["three separate"] = await open_recipe(stack, SELF_PLAY, ())
        refits = await time_refits(runs, num_refits)
        print_table(("refit of", "ms"), {name: [own] for name, own in refits.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--refits", type=int, default=100)
    parser.add_argument("overrides", nargs="*", help="keys of the recipe, for both")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.steps, arguments.refits, arguments.overrides))
